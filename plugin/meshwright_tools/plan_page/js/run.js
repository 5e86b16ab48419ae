// The whole run: the reader writes its tokens and the price of a GPU-hour, and sees days, GPU-hours and cost.

const UNITS = { "": 1, K: 1e3, M: 1e6, B: 1e9, T: 1e12 };

// Returns the number of tokens that a text such as 300B or 1.5T names, or nothing.
function tokensOf(text) {
  const found = /^\s*(\d+(?:\.\d+)?)\s*([kKmMbBtT]?)\s*$/.exec(text);
  const tokens = found ? Math.floor(Number(found[1]) * UNITS[found[2].toUpperCase()]) : 0;
  return tokens >= 1 ? tokens : null;
}

function priceOf(text) {
  const price = Number(text);
  return /^[\d.e+\s-]+$/i.test(text) && Number.isFinite(price) && price > 0 ? price : null; // as --price reads it
}

const days = (value) => (value >= 730 ? `${(value / 365.25).toFixed(1)} years`
  : value >= 2 ? `${value.toFixed(value >= 100 ? 0 : 1)} days` : `${(24 * value).toFixed(1)} hours`);

// Returns the tiles of a plan's whole run; the range is that of the estimated step.
function runTiles(choice) {
  const [tokens, price] = [tokensOf(state.tokens), priceOf(state.price)];
  const none = (why) => ["\u2013", why];
  const [batch, length, gpus] = state.setting.map((at, slider) => data.sliders[SLIDERS[slider]][at]);
  const missing = !choice.fits ? "the plan does not fit" : tokens ? "" : "write tokens, such as 300B or 1.5T";
  const steps = missing ? 0 : Math.ceil(tokens / (batch * length));
  const hours = missing ? 0 : (steps * choice.time) / 3.6e6;
  const range = (text, value) => `${text(value / (1 + data.band))} to ${text(value * (1 + data.band))}`;
  const rows = [
    ["Steps", missing ? none(missing) : [grouped(steps), `of ${grouped(batch * length)} tokens`]],
    ["Time", missing ? none(missing) : [days(hours / 24), range(days, hours / 24)]],
    ["GPU-hours", missing ? none(missing) : [grouped(hours * gpus), range(grouped, hours * gpus)]],
    ["Cost", missing ? none(missing) : price === null ? none("write the price of a GPU-hour")
      : [grouped(hours * gpus * price), range(grouped, hours * gpus * price)]],
  ];
  return rows.map(([name, [value, note]]) =>
    `<div><dt>${name}</dt><dd><b>${escape(value)}</b><small>${escape(note)}</small></dd></div>`).join("");
}

// Returns the options of the command line that print the same figures.
function runOptions() {
  if (tokensOf(state.tokens) === null) return "";
  return ` --tokens ${state.tokens.trim()}${priceOf(state.price) === null ? "" : ` --price ${state.price.trim()}`}`;
}
