// Memory against time: all plans as specks, the Pareto front as a line, and the plans of the table as numbered dots.

const LEFT = 58; // room for the labels of the time axis

function logTicks(low, high) {
  if (high / low < 3) return ticks(low, high, 5);
  const factors = high / low < 12 ? [1, 1.5, 2, 3, 4, 5, 6, 8] : [1, 2, 5];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of factors) {
      const value = Number((factor * 10 ** power).toPrecision(6));
      if (low <= value && value <= high) found.push(value);
    }
  }
  return found;
}

// Returns where the diagram draws a memory and a time, given the plans of the table.
function frontScales(choices, isPlanned, width, height) {
  const capacity = data.device.memory;
  const times = choices.filter((choice) => choice.fits).map((choice) => choice.time);
  const fastest = Math.min(...times);
  const most = isPlanned ? Math.max(...data.points.time) : Math.min(Math.max(...times), 6 * fastest);
  const slowest = Math.max(most, 1.25 * fastest);
  const [low, high] = [Math.log(fastest * 0.88), Math.log(slowest * 1.06)];
  const [right, top, bottom] = [14, 16, 46];
  return {
    capacity, low, high, right, top, base: height - bottom,
    x: (memory) => LEFT + ((width - LEFT - right) * memory) / capacity,
    y: (time) => top + ((height - top - bottom) * (high - Math.log(time))) / (high - low),
  };
}

function specks({ x, y }, width) {
  const speckPaths = (data.speckPaths ??= new Map()); // by width, since they are drawn for the planned job alone
  if (!speckPaths.has(width)) {
    const dots = data.points.memory.map((memory, index) => `M${at2(x(memory))} ${at2(y(data.points.time[index]))}h0`);
    speckPaths.set(width, dots.join(""));
  }
  return speckPaths.get(width);
}

function frontPicture(choices, shown, isPlanned, width, ident, height = 400) {
  const fitting = choices.filter((choice) => choice.fits);
  const scales = frontScales(choices, isPlanned, width, height);
  const { x, y, base, top, right, capacity, low, high } = scales;
  const description =
    (isPlanned ? `${grouped(data.points.count)} plans fit. ` : "") +
    fitting.map((choice, place) => `${place + 1}: ${choice.label}, ${gib(choice.memory)}, ${seconds(choice.time)}`).join("; ");
  const svg = new Svg({ ident, width, height, title: "Memory against step time", description });
  for (const value of ticks(0, capacity / 1024, width < 480 ? 4 : 6)) {
    svg.line(x(value * 1024), top, x(value * 1024), base, "grid");
    svg.text(x(value * 1024), base + 17, `${value}`, "axis", "middle");
  }
  svg.text(width - right, height - 8, "memory of a device, GiB", "axis", "end");
  for (const value of logTicks(Math.exp(low) / 1e3, Math.exp(high) / 1e3)) {
    svg.line(LEFT, y(1e3 * value), width - right, y(1e3 * value), "grid");
    svg.text(LEFT - 8, y(1e3 * value) + 4, value >= 1 ? `${value} s` : `${at2(1e3 * value)} ms`, "axis", "end");
  }
  svg.text(width < 480 ? 0 : LEFT, height - 8, "step time, log", "axis");
  if (isPlanned) {
    svg.path(specks(scales, width), "specks");
  }
  svg.line(x(data.budget), top, x(data.budget), base, "mark");
  svg.text(x(data.budget) - 6, top + 10, `budget ${gib(data.budget)}`, "mark-label halo", "end");
  if (isPlanned) {
    const front = data.points.front.filter(([, time]) => Math.log(time) <= high);
    const stairs = front.map(([memory, time], index) =>
      index ? `H${at2(x(memory))}V${at2(y(time))}` : `M${at2(x(memory))} ${at2(y(time))}`);
    if (front.length) svg.path(stairs.join(""), "front");
    const below = width < 480 ? 30 : 12; // a phone has no room beside the budget
    if (data.points.slower) svg.text(LEFT + 8, top + below, `${grouped(data.points.slower)} slower plans not drawn`, "muted halo");
  }
  const drawn = fitting.map((choice, place) => [choice, place + 1]).filter(([choice]) => Math.log(choice.time) <= high);
  for (const [choice, place] of drawn.reverse()) { // the first plan lies on top
    const which = shown.indexOf(choice.index);
    const kind = which === 0 ? "choice" : which === 1 ? "other-choice" : "listed";
    svg.open(`dot-of ${kind}`, { plan: choice.index });
    const [cx, cy] = [at2(x(choice.memory)), at2(y(choice.time))];
    const title = `${choice.label}: ${gib(choice.memory)}, ${seconds(choice.time)}`;
    svg.add(`<circle cx="${cx}" cy="${cy}" r="${which >= 0 ? 11 : 9}"`, "circle", title);
    svg.text(cx, cy + 3.8, `${place}`, "dot-number", "middle");
    svg.close();
  }
  return svg;
}

// Returns the speck nearest to a place of the diagram, as text, if one is near.
function speckAt(px, py, scales) {
  let [best, near] = [36, -1];
  data.points.memory.forEach((memory, index) => {
    const distance = (scales.x(memory) - px) ** 2 + (scales.y(data.points.time[index]) - py) ** 2;
    if (distance < best) [best, near] = [distance, index];
  });
  if (near < 0) return "";
  const least = data.points.bound.includes(near) ? "at least " : "";
  return `${words(data.points.label[near])}: ${gib(data.points.memory[near])}, ${least}${seconds(data.points.time[near])}`;
}
