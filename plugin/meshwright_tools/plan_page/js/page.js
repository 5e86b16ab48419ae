// The page's state and events: which plan is shown, which one it is compared with, and where the sliders stand.

const state = { ...readAddress(), sort: ["place", 1], zoom: 0 };
const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
const isPlannedSetting = () => state.setting.every((at, slider) => at === data.planned[slider]);
const everyChoice = () => data.plans.map((_, index) => choiceAt(index, state.setting));
// Plans that fit come first, plans without 32-bit masters after the others, then the simplest of the fastest plans.
// At the planned job this is the order of the data, but for the planner's first plan, which leads.
function inOrder(choices) {
  if (isPlannedSetting()) return choices;
  const fastest = [false, true].map((rounds) =>
    Math.min(...choices.filter((one) => one.fits && one.plan.rounds === rounds).map((one) => one.time)));
  const far = (one) => !(one.fits && one.time <= fastest[+one.plan.rounds] * (1 + data.within));
  return choices.sort((one, two) => two.fits - one.fits || one.plan.rounds - two.plan.rounds || far(one) - far(two)
    || (far(one) ? 0 : one.plan.simple - two.plan.simple) || (one.time ?? 0) - (two.time ?? 0) || one.index - two.index);
}
const original = { tiles: $("#tiles").innerHTML, words: $("#words").textContent };

// The plan to show: the one that was picked, otherwise the fastest of the table that fits.
function shownPlan(ordered) {
  if (state.plan !== null) return choiceAt(state.plan, state.setting);
  return ordered[0].fits ? ordered[0] : ordered.find((choice) => !choice.reason) ?? ordered[0];
}

// Most changes leave some cards as they are, and the browser need not lay those out again.
const contents = new WeakMap();
function fill(node, html) {
  if (contents.get(node) === html) return;
  contents.set(node, html);
  node.innerHTML = html;
}

function redraw() {
  widthOf(null);
  drawAnswer();
  const ordered = inOrder(everyChoice());
  const one = shownPlan(ordered);
  const two = state.other === null || state.other === one.index ? null : choiceAt(state.other, state.setting);
  drawHeader(one, ordered);
  drawSliders(one);
  drawTable(one, two, ordered);
  drawCards(one, two, ordered);
  return one;
}

function drawHeader(one, ordered) {
  const isFirst = data === answers[0] && isPlannedSetting() && one.index === 0;
  $("#shown").textContent = one.label;
  $("#future").hidden = one.plan.runs;
  $("#words").textContent = one.reason ? `cannot run here: ${one.reason}` : one.words;
  $("#tiles").innerHTML = isFirst ? original.tiles : tiles(one, ordered);
  const rows = [];
  if (one.fits) {
    rows.push(["Limited by", limits(one)], ["Next best", nextBest(one, ordered)]);
    rows.push(["Twice the batch", twiceTheBatch(one, state.setting, isPlannedSetting() && one.index === 0)]);
  }
  if (!one.reason) rows.push(["Ranks", placement(one)]);
  $("#answers").innerHTML = rows.map(([term, text]) => `<div><dt>${term}</dt><dd>${escape(text)}</dd></div>`).join("");
  const [batch, length, gpus] = state.setting.map((at, slider) => data.sliders[SLIDERS[slider]][at]);
  const nodes = Math.max(1, Math.floor(gpus / data.gpusPerNode));
  const machines = nodes > 1 ? `--num_machines ${nodes} --machine_rank $RANK --main_process_ip $HOST ` : "";
  $("#launch").textContent = `meshwright launch ${machines}--plan "${one.label}" train.py`;
  $("#launch-row").hidden = !one.fits || !one.plan.runs;
  $("#replan").textContent = data.commands.plan
    .replace("{gpus}", gpus).replace("{length}", length).replace("{batch}", batch)
    .replace(" --html", `${runOptions()} --html`);
  $("#shown").title = meaning(one.label);
  $("#run").innerHTML = runTiles(one);
  for (const name of ["tokens", "price"]) if ($(`#${name}`).value !== state[name]) $(`#${name}`).value = state[name];
}

function tiles(one, ordered) {
  const [batch, length, gpus] = state.setting.map((at, slider) => data.sliders[SLIDERS[slider]][at]);
  const none = ["\u2013", one.reason ?? "does not fit"];
  const room = (choice) => data.budget - choice.memory;
  const memory = one.reason ? none : [gib(one.memory), room(one) >= 0
    ? `${gib(room(one))} below the budget of ${gib(data.budget)}` : `${gib(-room(one))} above the budget of ${gib(data.budget)}`];
  const ties = one.fits ? ordered.filter((other) => other.fits && other.index !== one.index &&
    Math.abs(other.time / one.time - 1) <= data.tie).length : 0;
  const rows = [
    ["Step time", one.fits ? [seconds(one.time), `${seconds(one.time / (1 + data.band))} to ` +
      `${seconds(one.time * (1 + data.band))} (\u00b1${percent(data.band)})`] : none],
    ["Tokens/s/GPU", one.fits ? [grouped(one.speed), `${grouped(one.speed * gpus)} on all GPUs`] : none],
    ["MFU", one.fits ? [percent(one.mfu, 1), "model FLOPs / peak FLOPs"] : none],
    ["Memory", memory],
    ["Ties", one.fits ? [ties ? plural(ties, "other") : "none", `of the table, within ${percent(data.tie)}`] : none],
  ];
  return rows.map(([name, [value, note]]) =>
    `<div><dt>${name}</dt><dd><b>${escape(value)}</b><small>${escape(note)}</small></dd></div>`).join("");
}

function sliderText(name, at, one) {
  const value = data.sliders[name][at];
  if (name === "batch") return plural(value, "sequence");
  if (name === "length") return `${grouped(value)} tokens`;
  if (name === "gpus") return grouped(value);
  const own = value === 1 ? "as planned" : `${value === 0.5 ? "\u00bd" : value}\u00d7 planned`;
  return one.reason ? own : `${own} (${one.microBatch})`;
}

function drawSliders(one) {
  SLIDERS.forEach((name, slider) => {
    const input = $(`#${name}`);
    input.value = state.setting[slider];
    const text = sliderText(name, state.setting[slider], one);
    $(`#${name}-value`).textContent = text;
    input.setAttribute("aria-valuetext", text);
  });
  $("#reset").disabled = isPlannedSetting() && state.plan === null && state.other === null;
}

const SORTED = { // sorted by none of these, the best plans come first
  plan: (choice) => choice.label,
  step: (choice) => choice.time ?? Infinity,
  speed: (choice) => choice.speed ?? -Infinity,
  mfu: (choice) => choice.mfu ?? -Infinity,
  memory: (choice) => choice.memory ?? Infinity,
};

function drawTable(one, two, ordered) {
  const body = $("#plans tbody");
  const focused = document.activeElement;
  const [key, direction] = state.sort;
  const value = SORTED[key] ?? ((choice) => ordered.indexOf(choice));
  const rows = [...ordered].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    return x === y ? ordered.indexOf(a) - ordered.indexOf(b) : (x < y ? -1 : 1) * direction;
  });
  const best = ordered[0].time;
  rows.forEach((choice, place) => {
    const row = $(`tr[data-plan="${choice.index}"]`, body);
    const cell = (name, text) => { $(`[data-cell="${name}"]`, row).textContent = text; };
    const isOne = choice.index === one.index;
    const isTwo = two !== null && choice.index === two.index;
    row.className = isOne ? "is-shown" : isTwo ? "is-compared" : "";
    cell("place", choice.fits ? ordered.indexOf(choice) + 1 : "");
    cell("label", choice.label);
    $(".pick", row).title = meaning(choice.label);
    cell("step", choice.fits ? seconds(choice.time) : choice.reason ? "cannot run" : "does not fit");
    cell("slower", choice.fits && choice.time > best ? `+${percent(choice.time / best - 1)}` : "");
    cell("speed", choice.fits ? grouped(choice.speed) : "");
    cell("mfu", choice.fits ? percent(choice.mfu, 1) : "");
    cell("memory", choice.reason ? "" : gib(choice.memory));
    cell("why", choice.reason ?? (choice.fits ? data.plans[choice.index].why + (choice.plan.runs ? "" : ", not in this version yet")
      : `${gib(choice.memory - data.budget)} above the budget`));
    $(".pick", row).setAttribute("aria-pressed", isOne);
    const compare = $(".compare", row);
    compare.setAttribute("aria-pressed", isTwo);
    compare.setAttribute("aria-label", `Compare ${choice.label} with the plan that is shown`);
    compare.disabled = isOne;
    if (body.rows[place] !== row) body.insertBefore(row, body.rows[place] ?? null);
  });
  if (focused && focused !== document.activeElement && body.contains(focused)) focused.focus();
  for (const head of $$("#plans th[data-sort]")) {
    const order = head.dataset.sort === key ? (direction > 0 ? "ascending" : "descending") : "none";
    head.setAttribute("aria-sort", order);
  }
}

// The widths are measured once, since each measurement makes the browser lay out the page.
let widths = new Map();
function widthOf(card) {
  if (!widths.size) for (const each of $$(".pictures")) widths.set(each.parentElement, Math.max(280, each.clientWidth || 336));
  return widths.get(card);
}

// Each card has the pictures of the shown plan, of the plan that it is compared with, a legend, and a table.
function drawCards(one, two, ordered) {
  const both = two === null ? [one] : [one, two];
  const runnable = both.filter((choice) => !choice.reason);
  const fitting = both.filter((choice) => choice.fits);
  const compared = $("#compared");
  compared.hidden = two === null || runnable.length < 2;
  if (!compared.hidden) {
    $("#one").textContent = one.label;
    $("#two").textContent = two.label;
    $("#comparison").innerHTML = comparison(one, two);
  }
  const isPlanned = isPlannedSetting();
  const limit = Math.max(data.device.memory, ...runnable.map((choice) => choice.memory));
  const longest = Math.max(0, ...fitting.map((choice) => choice.time));
  const shown = both.map((choice) => choice.index);
  const pictures = {
    memory: [runnable, (choice, width, ident) => memoryBars(choice, width, ident, limit)],
    time: [ordered[0].fits ? [one] : [], (choice, width, ident) => timeBars(ordered, shown, width, ident)],
    timeline: [fitting, (choice, width, ident) => timelinePicture(choice, width * 2 ** state.zoom, ident, longest)],
    ranks: [runnable, rankPicture],
    front: [ordered[0].fits ? [one] : [], (choice, width, ident) => frontPicture(ordered, shown, isPlanned, width, ident)],
  };
  for (const [name, [choices, draw]] of Object.entries(pictures)) {
    const card = $(`#${name}-card`);
    const width = widthOf(card);
    const isDouble = two !== null && !["time", "front"].includes(name);
    const drawn = choices.map((choice, index) => {
      const letter = "AB"[both.indexOf(choice)];
      const head = isDouble ? `<p class="which"><b>${letter}</b> <code>${escape(choice.label)}</code></p>` : "";
      const svg = draw(choice, width, index ? `${name}-${index}` : name);
      return `${head}<div class="picture"${zoomed(name)}>${svg}</div>`;
    }).join("") + missing(name, both, choices, ordered);
    fill($(".pictures", card), drawn);
    const isDrawn = choices.length > 0 && (!["time", "timeline"].includes(name) || fitting.length > 0);
    const legend = isDrawn ? legends[name](name === "time" || name === "timeline" ? fitting : choices, ordered) : [];
    fill($(".legend", card), legend.map(legendEntry).join(""));
    const isOpen = $("details", card).open;
    fill($(".as-table", card), choices.length && isOpen ? asTables[name](choices, ordered) : "");
  }
  $("#front-words").textContent = isPlanned
    ? `Numbered dots are the plans of the table: select one to show it. Specks are ${grouped(data.points.count)} plans that ` +
      "fit. The line joins the plans that no other plan beats in both memory and time."
    : "Numbered dots are the plans of the table at this setting. The other plans are known for the planned job only.";
}

function missing(name, both, choices, ordered) {
  if (name === "time" || name === "front") return ordered[0].fits ? "" : '<p class="none">No plan of the table fits.</p>';
  return both.filter((choice) => !choices.includes(choice)).map((choice) =>
    `<p class="none">${escape(choice.label)}: ${escape(choice.reason ??
      `needs ${gib(choice.memory)}, ${gib(choice.memory - data.budget)} more than the budget, so there is no step to draw`)}.</p>`).join("");
}

function legendEntry([part, name, text]) {
  const hatch = data.hatched.includes(part) ? '<rect width="13" height="13" class="hatch"/>' : "";
  const sample = `<rect width="13" height="13" class="f-${part}"/>${hatch}`;
  const icon = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 13 13" aria-hidden="true">${sample}</svg>`;
  return `<li>${icon}<span>${name ? `<b>${escape(name)}</b> ` : ""}${escape(text)}</span></li>`;
}

function announce(one) {
  const text = one.reason ? `cannot run: ${one.reason}` : one.fits
    ? `${seconds(one.time)} per step, ${gib(one.memory)} of ${gib(data.budget)}` : `does not fit, needs ${gib(one.memory)}`;
  $("#status").textContent = `${one.label}: ${text}.`;
}

// A zoomed timeline is wider than its card, which scrolls.
const zoomed = (name) => (name === "timeline" && state.zoom ? ` style="width: ${100 * 2 ** state.zoom}%"` : "");

function change(values) {
  Object.assign(state, values);
  announce(redraw());
  writeAddress();
}

function pick(index) {
  change({ plan: index, other: state.other === index ? null : state.other });
}

for (const [slider, name] of SLIDERS.entries()) {
  $(`#${name}`).addEventListener("input", (event) => {
    const setting = [...state.setting];
    setting[slider] = Number(event.target.value);
    change({ setting });
  });
}
$("#reset").addEventListener("click", () => change({ setting: [...data.planned], plan: null, other: null }));
for (const name of ["tokens", "price"]) $(`#${name}`).addEventListener("input", (event) => change({ [name]: event.target.value }));
$("#zoom").addEventListener("input", (event) => change({ zoom: Number(event.target.value) }));
$("#save-trace").addEventListener("click", () => saveTrace(redraw()));
addEventListener("hashchange", () => { Object.assign(state, readAddress()); redraw(); });
$("#plans").addEventListener("click", (event) => {
  const head = event.target.closest("th[data-sort]");
  if (head) {
    const [key, direction] = state.sort;
    const first = ["speed", "mfu"].includes(head.dataset.sort) ? -1 : 1; // the best plans come first
    return change({ sort: [head.dataset.sort, head.dataset.sort === key ? -direction : first] });
  }
  const row = event.target.closest("tr[data-plan]");
  if (!row) return;
  const index = Number(row.dataset.plan);
  if (event.target.closest(".compare")) {
    // The shown plan is held, so that the sliders do not replace it by the one it is compared with.
    return change({ plan: redraw().index, other: state.other === index ? null : index });
  }
  pick(index);
});
$("#more").addEventListener("click", () => {
  const isFolded = $("#plans").classList.toggle("is-folded");
  $("#more").setAttribute("aria-expanded", !isFolded);
  labelMore();
});
$("#front-card").addEventListener("click", (event) => {
  const dot = event.target.closest("[data-plan]");
  if (dot) pick(Number(dot.dataset.plan));
});
$("#front-card").addEventListener("pointermove", (event) => {
  const picture = $("#front");
  if (!picture || !isPlannedSetting()) return;
  const box = picture.getBoundingClientRect();
  const scales = frontScales(everyChoice(), true, widthOf($("#front-card")), 400);
  const shrunk = widthOf($("#front-card")) / box.width;
  $("#speck").textContent = speckAt((event.clientX - box.x) * shrunk, (event.clientY - box.y) * shrunk, scales);
});
$("#timeline-card").addEventListener("pointermove", (event) => {
  const group = event.target.closest(".rects");
  if (!group) return;
  const picture = group.ownerSVGElement;
  const box = picture.getBoundingClientRect();
  const shrunk = picture.viewBox.baseVal.width / box.width;
  const title = titleAt(picture.id, (event.clientX - box.x) * shrunk, (event.clientY - box.y) * shrunk);
  group.firstElementChild.textContent = title;
});
for (const details of $$(".pictures ~ details")) details.addEventListener("toggle", redraw);
for (const button of $$(".copy")) {
  button.addEventListener("click", async () => {
    const text = $(`#${button.dataset.of}`);
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(text); // a page from a file may not write to the clipboard
      button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}
let lastWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== lastWidth) { // a phone's address bar changes the height alone
    widths = new Map();
    redraw();
  }
  lastWidth = innerWidth;
});
document.documentElement.classList.add("is-alive");
redraw();
