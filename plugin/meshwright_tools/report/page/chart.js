// One chart of the runs' figures: lines or stacked bands over the steps, with marks, a cursor and a range to zoom into.

const LEFT = 62, TOP = 12, BOTTOM = 24, HEIGHT = 232;
const INNER = HEIGHT - TOP - BOTTOM;
const UNITS = {
  seconds: (v) => (v >= 100 ? `${v.toFixed(0)} s` : v >= 1 ? `${v.toPrecision(3)} s` : v >= 1e-3 || !v
    ? `${Number((v * 1e3).toPrecision(3))} ms` : `${Number((v * 1e6).toPrecision(3))} µs`),
  gib: (v) => (v >= 1 || !v ? `${Number(v.toPrecision(3))} GiB` : `${Number((v * 1024).toPrecision(3))} MiB`),
  percent: (v) => `${Number((100 * v).toPrecision(3))}%`,
  count: (v) => (v >= 1e9 ? `${short(v / 1e9)} B` : v >= 1e6 ? `${short(v / 1e6)} M` : v >= 1e4 ? `${short(v / 1e3)} k` : short(v)),
  number: (v) => (v && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e5) ? v.toExponential(2) : String(Number(v.toPrecision(4)))),
};
const short = (v) => String(Number(v.toPrecision(3)));
const at2 = (v) => Math.round(100 * v) / 100;
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escape = (text) => String(text).replace(/[&<>"']/g, (character) => ESCAPES[character]);

// The exponential mean of the values so far, without the pull towards zero at the start.
function smoothed(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null || !weight) return value;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + 1 - weight;
    return mean / total;
  });
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => power * factor >= rough * 0.99);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) {
    found.push(Number((index * step).toPrecision(12)));
  }
  return found;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low);
  if (decades < 0.7) return ticks(low, high, 4).filter((value) => value > 0);
  const found = [], factors = decades > 3 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of factors) found.push(factor * 10 ** power);
  }
  return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
}

// The index of the value in a sorted list that is nearest to a place.
function nearest(sorted, place) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= place) low = middle; else high = middle;
  }
  return high >= 0 && Math.abs(sorted[high] - place) < Math.abs(sorted[low] - place) ? high : low;
}

class Chart {
  // `page` has the state that all charts share: the range, the cursor, the smoothing, and how to change them.
  constructor(spec, page) {
    Object.assign(this, { spec, page, lines: [], width: 0 });
    this.node = document.createElement("section");
    this.node.className = "card chart";
    this.node.id = `chart-${spec.id}`;
    this.node.innerHTML = `<div class="chart-head"><h2>${escape(spec.title)}</h2><span class="tools">` +
      (spec.bands ? "" : '<button type="button" class="log" aria-pressed="false">log</button>') +
      `<button type="button" class="csv" title="Download the shown values">CSV</button></span></div>` +
      `<p>${escape(spec.words)}</p><div class="plot" tabindex="0" role="group" aria-label="${escape(spec.title)}: arrow keys ` +
      'move the cursor, plus and minus zoom, Escape shows all"></div><ul class="keys"></ul><div class="tip" hidden=""></div>';
    [this.plot, this.keys, this.tip] = [".plot", ".keys", ".tip"].map((name) => this.node.querySelector(name));
    this.node.querySelector(".log")?.addEventListener("click", () => page.toggleLog(spec.id));
    this.node.querySelector(".csv").addEventListener("click", () => this.download());
    this.listen();
  }

  get isLog() { return !this.spec.bands && this.page.logs.has(this.spec.id); }

  x(value) { const [low, high] = this.page.shown; return LEFT + (value - low) / (high - low || 1) * (this.width - LEFT - 10); }

  step(pixel) { const [low, high] = this.page.shown; return low + (pixel - LEFT) / (this.width - LEFT - 10) * (high - low); }

  y(value) {
    const [low, high] = this.heights;
    const share = this.isLog ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    return TOP + INNER * (1 - share);
  }

  // Draw lines {name, colour, dash, dots, x, y}, levels {from, to, value, band, colour} and marks {x, kind, text}.
  draw({ lines, levels = [], marks = [] }) {
    this.width = Math.max(240, this.plot.clientWidth || 520);
    this.marks = marks;
    this.lines = lines.map((line) => ({ ...line, soft: smoothed(line.y, line.dots || this.spec.bands || this.spec.exact ? 0 : this.page.smooth) }));
    if (this.spec.bands) this.stack();
    const button = this.node.querySelector(".log");
    if (button) button.setAttribute("aria-pressed", String(this.isLog));
    const seen = this.visible(levels);
    this.isEmpty = !seen.length;
    if (this.isEmpty) {
      this.plot.innerHTML = '<p class="none">no values in this range</p>';
      this.keys.innerHTML = "";
      return;
    }
    this.heights = this.range(seen);
    const parts = [this.grid(), `<g clip-path="url(#clip-${this.spec.id})">`];
    for (const mark of marks) parts.push(this.mark(mark));
    for (const level of levels) parts.push(this.level(level));
    for (const line of this.lines) parts.push(this.spec.bands ? this.band(line) : this.line(line));
    parts.push('</g><g class="cursor"></g>');
    const last = this.lines.map((line) => `${line.name} ends at ${this.words(this.lastOf(line))}`).join("; ");
    this.plot.innerHTML =
      `<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="${escape(this.spec.title)}: ${escape(last)}" ` +
      `viewBox="0 0 ${this.width} ${HEIGHT}" width="${this.width}" height="${HEIGHT}"><defs><clipPath id="clip-${this.spec.id}">` +
      `<rect x="${LEFT}" y="${TOP - 3}" width="${this.width - LEFT - 6}" height="${INNER + 6}"/></clipPath></defs>${parts.join("")}</svg>`;
    this.cursor(this.page.cursorAt);
  }

  words(value) { return value === null || value === undefined ? "none" : UNITS[this.spec.unit](value); }

  lastOf(line) { return line.soft.findLast((value) => value !== null) ?? null; }

  // The values that decide the height of the axis: those of the visible points and the levels.
  visible(levels) {
    const [low, high] = this.page.shown, found = [];
    for (const { x, soft, top } of this.lines) {
      const values = top ?? soft;
      x.forEach((place, index) => { if (place >= low && place <= high && values[index] !== null) found.push(values[index]); });
    }
    const isFine = (value) => !this.isLog || value > 0;
    const kept = found.filter(isFine);
    return kept.length ? [...kept, ...levels.map((level) => level.value).filter(isFine)] : [];
  }

  range(values) {
    let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    if (this.isLog) return high > low ? [low / 1.05, high * 1.05] : [low / 2, high * 2];
    if (this.spec.zero && low >= 0) low = 0;
    if (high <= low) [low, high] = low ? [low - Math.abs(low) * 0.05, high + Math.abs(high) * 0.05] : [0, 1];
    const space = 0.05 * (high - low);
    return [low === 0 || (low > 0 && low < space) ? 0 : low - space, high + space];
  }

  stack() {
    const sums = (this.lines[0]?.x ?? []).map(() => 0);
    for (const line of this.lines) {
      line.bottom = [...sums];
      line.y.forEach((value, index) => { sums[index] += value ?? 0; });
      line.top = [...sums];
    }
  }

  grid() {
    const values = this.isLog ? logTicks(...this.heights) : ticks(...this.heights, 5);
    const found = values.map((value) => `<path class="grid" d="M${LEFT} ${at2(this.y(value))}H${this.width - 6}"/>` +
      `<text class="axis" x="${LEFT - 7}" y="${at2(this.y(value) + 4)}" text-anchor="end">${escape(this.words(value))}</text>`);
    for (const value of ticks(...this.page.shown, this.width > 420 ? 6 : 3)) {
      if (this.page.axis === "step" && value !== Math.round(value)) continue;
      const x = this.x(value), anchor = x > this.width - 24 ? "end" : "middle";
      if (x < LEFT - 1 || x > this.width) continue;
      found.push(`<text class="axis" x="${at2(Math.min(x, this.width - 4))}" y="${HEIGHT - 6}" text-anchor="${anchor}">${escape(this.page.place(value, true))}</text>`);
    }
    return found.join("");
  }

  mark({ x, kind }) { return `<path class="mark-${kind}" d="M${at2(this.x(x))} ${TOP}V${TOP + INNER}"/>`; }

  level({ from, to, value, band, colour }) {
    const [x1, x2] = [from, to].map((place) => at2(Math.min(Math.max(this.x(place), LEFT), this.width - 6)));
    if (x2 <= x1 || (this.isLog && value <= 0)) return "";
    const area = band ? `<rect class="level-band" x="${x1}" width="${at2(x2 - x1)}" y="${at2(this.y(value * (1 + band)))}" height="${
      at2(this.y(value / (1 + band)) - this.y(value * (1 + band)))}"/>` : "";
    return `${area}<path class="level" style="stroke: var(--c${colour})" d="M${x1} ${at2(this.y(value))}H${x2}"/>` +
      `<text class="level-words" x="${x2 - 4}" y="${at2(this.y(value) - 5)}" text-anchor="end">estimated ${escape(this.words(value))}</text>`;
  }

  // A path through the points in and next to the range; points without a value interrupt it.
  path(line, values) {
    const [low, high] = this.page.shown;
    let path = "", isDown = false;
    for (let index = 0; index < line.x.length; index++) {
      const value = values[index];
      if ((line.x[index + 1] ?? low) < low || (line.x[index - 1] ?? high) > high) continue;
      if (value === null || (this.isLog && value <= 0)) { isDown = false; continue; }
      path += `${isDown ? "L" : "M"}${at2(this.x(line.x[index]))} ${at2(this.y(value))}`;
      isDown = true;
    }
    return path;
  }

  line(line) {
    const style = `style="stroke: var(--c${line.colour})"`, dash = ["", "6 4", "2 3", "9 3 2 3"][line.dash % 4];
    const raw = this.page.smooth && !line.dots && !this.spec.exact ? `<path class="raw" ${style} d="${this.path(line, line.y)}"/>` : "";
    const path = this.path(line, line.soft);
    const points = path.match(/[ML][^ML]*/g) ?? [];
    const dots = line.dots || points.length <= 40
      ? points.map((point) => point.slice(1).split(" ")).map(([x, y]) => `<circle cx="${x}" cy="${y}" r="${line.dots ? 3.2 : 2.2}" style="fill: var(--c${line.colour})"/>`).join("") : "";
    return `${raw}<path class="stroke" ${style}${dash ? ` stroke-dasharray="${dash}"` : ""} d="${path}"/>${dots}`;
  }

  band(line) {
    const there = line.x.map((place, index) => [place, line.top[index], line.bottom[index]]);
    const top = there.map(([place, high]) => `${at2(this.x(place))} ${at2(this.y(high))}`);
    const bottom = there.map(([place, , low]) => `${at2(this.x(place))} ${at2(this.y(low))}`).reverse();
    return top.length ? `<path class="part f-${line.part}" d="M${[...top, ...bottom].join("L")}Z"/>` : "";
  }

  // Show the values at a place, or the last ones: beside each name, and in the tip if the pointer is in this chart.
  cursor(place, isHere = false) {
    if (this.isEmpty) return;
    const rows = this.lines.map((line) => {
      const index = place === null ? null : nearest(line.x, place);
      const value = index === null ? this.lastOf(line) : line.soft[index] ?? null;
      return { line, index, value, raw: index === null ? null : line.y[index] ?? null };
    });
    this.keys.innerHTML = rows.map(({ line, value }) => `<li>${this.swatch(line)}<span>${escape(line.name)}</span><b>${escape(this.words(value))}</b></li>`).join("");
    const found = [], first = rows.find(({ index, line }) => index !== null && line.x.length);
    if (place !== null && first) {
      const x = at2(this.x(first.line.x[first.index]));
      if (x >= LEFT - 1 && x <= this.width) found.push(`<path class="crosshair" d="M${x} ${TOP}V${TOP + INNER}"/>`);
      for (const { line, index, value } of rows) {
        const height = line.top ? line.top[index] : value;
        const at = this.x(line.x[index]);
        if (height !== null && at >= LEFT && !(this.isLog && height <= 0)) {
          found.push(`<circle class="at" cx="${at2(at)}" cy="${at2(this.y(height))}" r="3.6" style="fill: ${line.part ? "var(--ink)" : `var(--c${line.colour})`}"/>`);
        }
      }
    }
    const group = this.plot.querySelector(".cursor");
    if (group) group.innerHTML = found.join("");
    this.tip.hidden = !isHere || !first;
    if (isHere && first) this.showTip(rows, first.line.x[first.index], place);
  }

  swatch(line) {
    return line.part ? `<svg viewBox="0 0 14 10" aria-hidden="true"><rect width="14" height="10" class="f-${line.part}"/></svg>`
      : `<svg viewBox="0 0 14 10" aria-hidden="true"><path class="stroke" d="M0 5H14" style="stroke: var(--c${line.colour})"${line.dash ? ' stroke-dasharray="4 3"' : ""}/></svg>`;
  }

  showTip(rows, at, place) {
    const near = this.marks.filter((mark) => Math.abs(this.x(mark.x) - this.x(place)) < 7).map((mark) => `<p class="on-mark">${escape(mark.text)}</p>`);
    const values = rows.filter(({ value }) => value !== null).map(({ line, value, raw }) => `<li>${this.swatch(line)}<span>${escape(line.name)}</span><b>${
      escape(this.words(value))}</b>${raw !== null && raw !== value ? `<small>${escape(this.words(raw))}</small>` : ""}</li>`);
    this.tip.innerHTML = `<p>${escape(this.page.place(at))}</p>${near.join("")}<ul>${values.slice(0, 12).join("")}</ul>`;
    const x = this.plot.offsetLeft + this.x(at), wide = this.tip.offsetWidth;
    this.tip.style.left = `${x + 14 + wide > this.node.clientWidth ? Math.max(4, x - wide - 14) : x + 14}px`;
    this.tip.style.top = `${this.plot.offsetTop + TOP}px`;
  }

  listen() {
    const place = (event) => event.clientX - this.plot.getBoundingClientRect().left;
    let from = null;
    this.plot.addEventListener("pointerdown", (event) => {
      if (event.button || place(event) < LEFT - 4) return;
      from = place(event);
      if (event.isTrusted) this.plot.setPointerCapture(event.pointerId);
    });
    this.plot.addEventListener("pointermove", (event) => {
      if (from !== null && Math.abs(place(event) - from) > 4) this.select(from, place(event));
      this.page.point(this, this.step(Math.min(Math.max(place(event), LEFT), this.width - 10)));
    });
    this.plot.addEventListener("pointerup", (event) => {
      const ends = from === null ? [] : [from, place(event)].map((pixel) => this.step(Math.min(Math.max(pixel, LEFT), this.width - 10)));
      const isZoom = from !== null && Math.abs(place(event) - from) > 4;
      from = null;
      this.plot.querySelector(".selection")?.remove();
      if (isZoom) this.page.zoom([Math.min(...ends), Math.max(...ends)]);
    });
    this.plot.addEventListener("pointercancel", () => { from = null; this.plot.querySelector(".selection")?.remove(); });
    this.plot.addEventListener("pointerleave", () => { if (from === null) this.page.point(this, null); });
    this.plot.addEventListener("dblclick", () => this.page.zoom(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
  }

  select(from, to) {
    const svg = this.plot.querySelector("svg");
    if (!svg) return;
    svg.querySelector(".selection")?.remove();
    const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const size = { class: "selection", x: Math.max(LEFT, Math.min(from, to)), y: TOP, width: Math.abs(to - from), height: INNER };
    for (const [name, value] of Object.entries(size)) rect.setAttribute(name, value);
    svg.append(rect);
  }

  key(event) {
    const line = this.lines[0], { shown, cursorAt } = this.page;
    if (!line?.x.length) return;
    const middle = cursorAt ?? (shown[0] + shown[1]) / 2, half = (shown[1] - shown[0]) / 2;
    const index = nearest(line.x, middle), moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key in moves) this.page.point(this, line.x[Math.min(Math.max(index + moves[event.key], 0), line.x.length - 1)]);
    else if (event.key === "+" || event.key === "=") this.page.zoom([middle - half / 2, middle + half / 2]);
    else if (event.key === "-") this.page.zoom([middle - 2 * half, middle + 2 * half]);
    else if (event.key === "Escape") this.page.zoom(null);
    else return;
    event.preventDefault();
  }

  download() {
    const rows = [["line", this.page.axis, "value"]];
    for (const { name, x, y } of this.lines) x.forEach((at, index) => { if (y[index] !== null) rows.push([name, at, y[index]]); });
    const text = rows.map((row) => row.map((cell) => `"${String(cell).replaceAll('"', '""')}"`).join(",")).join("\n");
    const link = Object.assign(document.createElement("a"), { download: `${this.spec.id}.csv`, href: `data:text/csv;charset=utf-8,${encodeURIComponent(text)}` });
    link.click();
  }
}
