// The page of runs: which lines each chart has, the controls that all charts share, and the runs as they go on.

let data = JSON.parse(document.getElementById("data").textContent);
const $ = (selector) => document.querySelector(selector);
const AXES = ["step", "tokens", "hours"];
const COLOURS = 8;
const NOT_DRAWN = /_(runtime|(samples|steps)_per_second)$|^(total_flos|loss|grad_norm|learning_rate|epoch|train_loss)$/;
const MOST_OWN = 24; // charts of the program's own values

const page = {
  axis: "step", smooth: 0, logs: new Set(), hidden: new Set(), range: null, cursorAt: null, charts: new Map(), shown: [0, 1],

  // The words of a place on the axis, short on the axis itself.
  place(value, isShort = false) {
    if (page.axis === "hours") return isShort ? `${Number(value.toPrecision(4))} h` : `after ${(value * 60).toFixed(1)} min`;
    if (page.axis === "tokens") return `${UNITS.count(value)}${isShort ? "" : " tokens"}`;
    return isShort ? Math.round(value).toLocaleString("en-US") : `step ${Math.round(value).toLocaleString("en-US")}`;
  },

  toggleLog(id) { if (!page.logs.delete(id)) page.logs.add(id); render(); },

  zoom(range) {
    const [low, high] = whole();
    page.range = range && [Math.max(range[0], low), Math.min(range[1], high)];
    if (page.range && (page.range[1] <= page.range[0] || (page.range[0] <= low && page.range[1] >= high))) page.range = null;
    render();
  },

  point(chart, place) {
    page.cursorAt = place;
    for (const each of page.charts.values()) each.cursor(place, each === chart && place !== null);
  },
};

const shownRuns = () => data.runs.filter((run) => !page.hidden.has(run.name));
const isOne = () => data.runs.length === 1;
const colourOf = (run) => data.runs.indexOf(run) % COLOURS;

// The place of a step of a run on the axis, between its lines if need be.
function placeOf(run, step) {
  const steps = run.axes.step, places = run.axes[page.axis];
  if (page.axis === "step" || !steps.length) return step;
  const at = nearest(steps, step);
  const left = steps[at] <= step ? at : at - 1, right = left + 1;
  if (left < 0) return places[0] === null ? 0 : (places[0] * Math.max(step, 0)) / (steps[0] || 1);
  if (right >= steps.length) return places[left];
  return places[left] + ((places[right] - places[left]) * (step - steps[left])) / (steps[right] - steps[left]);
}

// All places on the axis, from the first to the last.
function whole() {
  const places = shownRuns().flatMap((run) => [
    ...(run.axes[page.axis] ?? []).filter((value) => value !== null),
    ...(run.axes.step.length && page.axis !== "step" ? [] : Object.values(run.values).flatMap((value) => value.step)),
  ]);
  if (!places.length) return [0, 1];
  const low = places.reduce((a, b) => Math.min(a, b)), high = places.reduce((a, b) => Math.max(a, b));
  return [low, high > low ? high : low + 1];
}

function linesOf(spec) {
  const found = [];
  for (const run of spec.bands ? shownRuns().slice(0, 1) : shownRuns()) {
    const add = (label, steps, values, more = {}) => {
      const kept = steps.map((at, index) => [at, values[index]]).filter(([at]) => at !== null);
      if (!kept.length || kept.every(([, value]) => value === null)) return;
      const dash = isOne() ? 0 : found.filter((line) => line.run === run).length;
      const name = isOne() || spec.bands ? label : spec.lines.length + (spec.values ? 1 : 0) > 1 && label ? `${run.name}: ${label}` : run.name;
      found.push({ run, name, x: kept.map(([at]) => at), y: kept.map(([, value]) => value), dash,
        colour: isOne() ? found.length % COLOURS : colourOf(run), ...more });
    };
    for (const [column, label, part] of spec.lines) {
      const ranks = spec.ranks && isOne() ? Object.keys(run.columns).filter((name) => name.startsWith(`${column}/`)) : [];
      for (const name of ranks) add(`rank ${name.split("/")[1]}`, run.axes[page.axis], run.columns[name]);
      if (!ranks.length && run.columns[column]) add(label, run.axes[page.axis], run.columns[column], { part });
    }
    for (const name of Object.keys(run.values).filter((each) => spec.values && new RegExp(spec.values).test(each))) {
      const { step, value } = run.values[name];
      add(name, step.map((at) => placeOf(run, at)), value, { dots: true });
    }
  }
  return found;
}

function levelsOf(spec) {
  if (!spec.estimate) return [];
  return shownRuns().flatMap((run) => run.estimates.filter((estimate) => estimate[spec.estimate]).map((estimate) => ({
    from: placeOf(run, estimate.from), to: estimate.to === null ? whole()[1] : placeOf(run, estimate.to), value: estimate[spec.estimate],
    band: spec.estimate === "seconds" ? estimate.band : null, colour: isOne() ? 1 : colourOf(run),
  })));
}

const marksOf = () => shownRuns().flatMap((run) => run.marks.map(({ step, kind, text }) =>
  ({ x: placeOf(run, step), kind, text: isOne() ? text : `${run.name}: ${text}` })));

// The charts that have lines: those of the page, and one for each value of the program's own.
function specs() {
  const known = data.charts.filter((spec) => linesOf(spec).length);
  const taken = data.charts.map((spec) => spec.values).filter(Boolean).map((text) => new RegExp(text));
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.values)))]
    .filter((name) => !NOT_DRAWN.test(name) && !taken.some((one) => one.test(name)))
    .sort((a, b) => a.startsWith("eval") === b.startsWith("eval") ? (a < b ? -1 : 1) : a.startsWith("eval") ? -1 : 1);
  return [...known, ...names.slice(0, MOST_OWN).map((name) => ({
    id: `own-${name.replace(/[^\w-]/g, (character) => `-${character.codePointAt(0)}-`)}`, title: name, words: "A value that the program has logged.", unit: "number", lines: [],
    values: `^${name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}$`,
  }))];
}

function render() {
  const [low, high] = whole();
  page.shown = page.range ?? [low, high];
  const wanted = specs(), marks = marksOf();
  for (const [id, chart] of page.charts) if (!wanted.some((spec) => spec.id === id)) { chart.node.remove(); page.charts.delete(id); }
  for (const spec of wanted) {
    if (!page.charts.has(spec.id)) page.charts.set(spec.id, new Chart(spec, page));
    const chart = page.charts.get(spec.id);
    if (chart.node.parentNode !== $("#charts")) $("#charts").append(chart.node);
    chart.draw({ lines: linesOf(spec), levels: levelsOf(spec), marks });
  }
  $("#zoom-out").disabled = !page.range;
  $("#smooth").value = page.smooth;
  $("#smooth-words").textContent = page.smooth ? page.smooth.toFixed(2) : "off";
  for (const option of $("#axis").options) option.disabled = !data.runs.some((run) => run.axes[option.value]?.some((value) => value !== null));
  $("#axis").value = page.axis;
  renderRuns();
  remember();
}

function renderRuns() {
  const list = $("#runs");
  list.hidden = isOne();
  list.innerHTML = isOne() ? "" : data.runs.map((run) => `<li><label><input type="checkbox"${page.hidden.has(run.name) ? "" : " checked"} data-run="${escape(run.name)}"/>` +
    `<i style="background: var(--c${colourOf(run)})"></i>${escape(run.name)}</label></li>`).join("");
}

// ---- the state in the address, so that a view is a link

function remember() {
  const [low, high] = page.range ?? [];
  const state = new URLSearchParams();
  if (page.axis !== "step") state.set("x", page.axis);
  if (page.smooth) state.set("smooth", String(page.smooth));
  if (page.logs.size) state.set("log", [...page.logs].join(","));
  if (page.range) state.set("zoom", `${Number(low.toPrecision(8))}:${Number(high.toPrecision(8))}`);
  for (const name of page.hidden) state.append("hide", name);
  const text = String(state);
  if (text !== location.hash.slice(1)) history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
}

function recall() {
  const state = new URLSearchParams(location.hash.slice(1));
  page.axis = AXES.includes(state.get("x")) ? state.get("x") : "step";
  page.smooth = Math.min(0.99, Math.max(0, Number(state.get("smooth")) || 0));
  page.logs = new Set((state.get("log") ?? "").split(",").filter(Boolean));
  page.hidden = new Set(state.getAll("hide"));
  const zoom = (state.get("zoom") ?? "").split(":").map(Number);
  page.range = zoom.length === 2 && zoom.every(Number.isFinite) && zoom[0] < zoom[1] ? zoom : null;
}

// ---- a run that goes on

async function refresh() {
  let words;
  try {
    const answer = await fetch("data.json", { cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()).slice(0, 300));
    data = await answer.json();
    $("#tiles").innerHTML = data.tiles;
    $("#details").innerHTML = data.details;
    if (!document.querySelector(".selection")) render();
    words = `live, read at ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    words = error instanceof TypeError ? "the server does not answer; the page shows what it had last" : error.message;
  }
  $("#live").textContent = words;
  setTimeout(refresh, data.live * 1000);
}

document.documentElement.classList.add("is-alive");
$("#axis").addEventListener("change", (event) => { page.axis = event.target.value; page.range = null; render(); });
$("#smooth").addEventListener("input", (event) => { page.smooth = Number(event.target.value); render(); });
$("#zoom-out").addEventListener("click", () => page.zoom(null));
$("#runs").addEventListener("change", (event) => {
  const { run } = event.target.dataset;
  if (!page.hidden.delete(run)) page.hidden.add(run);
  render();
});
addEventListener("hashchange", () => { recall(); render(); });
let frame = 0;
new ResizeObserver(() => { cancelAnimationFrame(frame); frame = requestAnimationFrame(render); }).observe($("main"));
addEventListener("beforeprint", render);
recall();
render();
if (data.live) setTimeout(refresh, data.live * 1000);
