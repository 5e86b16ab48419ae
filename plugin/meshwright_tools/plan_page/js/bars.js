// Stacked bars: the memory of each rank, and the step time of plans.

const NOTE = 66; // width of the totals' column

const rankSpan = (choice, first, last) => {
  const ranks = choice.dp * choice.plan.cp * choice.plan.tp;
  return [first * ranks, (last + 1) * ranks - 1];
};

function groupLabel(choice, { first, last }) {
  const [from, to] = rankSpan(choice, first, last);
  const ranks = to > from ? `ranks ${span(from, to)}` : `rank ${from}`;
  return choice.plan.pp > 1 ? `stage${last > first ? "s" : ""} ${span(first, last)}, ${ranks}` : ranks;
}

function memoryBars(choice, width, ident, limit) {
  const bars = choice.groups.map((group) => {
    const note = group.parts ? gib(group.total) : `${Math.round(group.least / 1024)}\u2013${gib(group.total)}`;
    const label = group.parts ? groupLabel(choice, group) : `\u2026 ${groupLabel(choice, group)}`;
    return { label, parts: group.parts, note, isStrong: group.total === choice.memory };
  });
  const description =
    bars.map((bar) => `${bar.label}: ${bar.note}`).join("; ") + `; the budget is ${gib(data.budget)}`;
  const svg = new Svg({ ident, width, title: `Memory of each rank of ${choice.label}`, description });
  const marks = [
    [data.device.memory, `device ${gib(data.device.memory)}`],
    [data.budget, `budget ${gib(data.budget)}`],
  ];
  return stacked(svg, bars, { names: data.memoryParts, limit, unit: gib, marks });
}

// The plans whose times are drawn: the fastest, and those that are shown.
function drawnTimes(ordered, shown) {
  const fitting = ordered.filter((choice) => choice.fits);
  return fitting.filter((choice, place) => place < 5 || shown.includes(choice.index));
}

function timeBars(ordered, shown, width, ident) {
  const choices = drawnTimes(ordered, shown);
  const bars = choices.map((choice) => ({
    label: `${ordered.indexOf(choice) + 1}  ${choice.label}`,
    parts: choice.times,
    note: seconds(choice.time),
    isStrong: shown.includes(choice.index),
  }));
  const description = bars.map((bar) => `${bar.label}: ${bar.note}`).join("; ");
  const svg = new Svg({ ident, width, title: "Step time of plans", description });
  const limit = Math.max(...choices.map((choice) => choice.time));
  return stacked(svg, bars, { names: data.timeParts, limit, unit: seconds, marks: [] });
}

function stacked(svg, bars, { names, limit, unit, marks }) {
  const thick = bars.length <= 2 ? 34 : bars.length <= 6 ? 24 : 14;
  const top = 18 * marks.length + (marks.length ? 8 : 0);
  const pitch = 20 + thick + (thick > 14 ? 14 : 8);
  const heights = bars.map((bar) => (bar.parts ? pitch : 28));
  svg.height = top + sum(heights) + 2;
  const scale = (svg.width - 2 - (marks.length ? NOTE : 0)) / limit; // lines must not cross the totals
  marks.forEach(([value, label], row) => {
    const x = value * scale;
    svg.line(x, 18 * row + 4, x, svg.height, "mark");
    svg.text(x - 6, 18 * row + 13, label, "mark-label", "end");
  });
  let y = top;
  bars.forEach((bar, index) => {
    if (!bar.parts) {
      svg.text(0, y + 16, bar.label, "muted halo");
      svg.text(svg.width - 2, y + 16, bar.note, "muted num halo", "end");
    } else {
      const room = svg.width - 2 - textWidth(bar.note, 12) - 10;
      svg.text(0, y + 13, shortened(bar.label, room), bar.isStrong ? "strong halo" : "label halo");
      svg.text(svg.width - 2, y + 13, bar.note, bar.isStrong ? "strong num halo" : "label num halo", "end");
      const total = sum(bar.parts);
      svg.open("bar", { total, scale });
      let x = 0;
      bar.parts.forEach((value, part) => {
        if (value <= 0) return;
        const box = [x, y + 20, value * scale, thick];
        const share = percent(value / total);
        svg.part(box, names[part], { title: `${names[part]}: ${unit(value)}, ${share} (${bar.label})` });
        if (thick >= 24) inside(svg, names[part], unit(value), box);
        x += value * scale;
      });
      svg.close();
    }
    y += heights[index];
  });
  return svg;
}

// A part's name and value on the part, as far as there is room.
function inside(svg, name, value, [x, y, length, thick]) {
  const room = length - 10;
  if (thick >= 30 && Math.max(textWidth(name, 11.5, BOLD), textWidth(value, 11)) < room) {
    svg.text(x + 6, y + 15, name, `inside t-${name}`);
    svg.text(x + 6, y + 28, value, `inside small t-${name}`);
  } else if (textWidth(name, 11.5, BOLD) < room) {
    svg.text(x + 6, y + thick / 2 + 4, name, `inside t-${name}`);
  }
}

function shortened(label, room) {
  const most = Math.floor(room / (CHARACTER * 12.4));
  return label.length <= most ? label : `${label.slice(0, Math.max(4, most - 1))}\u2026`;
}
