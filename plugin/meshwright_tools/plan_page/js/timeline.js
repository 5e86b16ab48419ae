// One step of a plan: the compute and communication of each pipeline stage, by micro-batch, and what hides behind what.

const SHORT = 6; // micro-batches that are drawn one by one for a plan without a pipeline
const STAGES = 8; // largest number of stages to draw; if there are more, the middle ones are left out
const REST = 64; // largest width of the fixed cost and stragglers, which have no definite time in the step
const BREAK = 86; // width of the gap in place of omitted micro-batches
const OPERATIONS = { F: "forward", B: "backward", I: "backward to the input", W: "gradients of the weights" };

// Returns the ranks of the pipeline that have a lane, and nothing in place of those that are left out.
function lanesOf(pp) {
  const all = Array.from({ length: pp }, (_, rank) => rank);
  return pp > STAGES ? [...all.slice(0, STAGES / 2), null, ...all.slice(pp - STAGES / 2)] : all;
}

// Returns the events of a step; the middle of a long schedule, which repeats itself, is left out.
const timelines = new WeakMap();

function timeline(choice) {
  if (!timelines.has(choice)) timelines.set(choice, simulated(choice));
  return timelines.get(choice);
}

// Returns the time of each kind of operation on each stage.
function stageTimes({ plan: { stages }, work: [layer, head, , shared] }) {
  const last = stages.length - 1;
  const of = (part) => stages.map((layers, stage) => layers * layer[part] + (stage === last ? head[part] : 0));
  const [forward, backward, weight] = [of(0).map((time) => time + shared), of(1), of(2)];
  const input = backward.map((time, stage) => time + shared - weight[stage]);
  return { F: forward, B: input.map((time, stage) => time + weight[stage]), I: input, W: weight };
}

function simulated(choice) {
  const { plan, count, work } = choice;
  const [, , transfer, , shares, again, dataParallel] = work;
  const { pp, schedule, chunks } = plan;
  const times = stageTimes(choice);
  let short = count;
  if (pp === 1) short = Math.min(count, count > SHORT + 2 ? SHORT : count);
  else if (count > 3 * pp) short = 2 * pp + (count % pp); // whole rounds of an interleaved schedule
  let events = simulate({ schedule, p: pp, v: chunks, m: short, times, transfer });
  const drawn = Math.max(...events.map((event) => event.end));
  const lanes = lanesOf(pp);
  events = events.filter((event) => lanes.includes(event.rank));
  const tail = ["data", "optimizer", "other"].map((name) => [name, timeOf(choice, name)]);
  const piped = choice.time - sum(tail.map(([, value]) => value));
  let cut = [drawn / 2, drawn / 2];
  if (short < count) {
    if (pp === 1) cut = [events[short - 1].end, events[short - 1].end]; // between two micro-batches
    const [at, by] = [cut[0], piped - drawn];
    const later = (event, start) => (
      { ...event, microBatch: event.microBatch + count - short, start: start + by, end: event.end + by });
    events = events.flatMap((event) => {
      if (event.end <= at) return [event];
      return event.start < at ? [{ ...event, end: at }, later(event, at)] : [later(event, event.start)];
    });
    cut = [at, at + by];
  }
  return {
    choice, events, cut, skipped: count - short, piped, tail, again, transfer,
    total: choice.time,
    shares: { tensor: shares[0], context: shares[1], experts: shares[3] },
    hidden: hiddenShares(choice, shares[2], dataParallel),
    lane: chunks > 1 ? "rank" : "stage",
  };
}

// Returns a function that gives the hidden communication of an event as [part, share of the event].
function hiddenShares(choice, context, dataParallel) {
  const slow = slowestRank(choice);
  return (event) => {
    const phase = event.kind === "F" ? "forward" : "backward";
    const isEdge = event.microBatch === (phase === "forward" ? 0 : choice.count - 1);
    const share = sum(
      dataParallel
        .filter(([when, isRepeated]) => when === phase && (isRepeated || isEdge))
        .map(([, , whole, exposed]) => (whole - exposed) / slow[phase]),
    );
    return [["context", context], ["data", Math.min(1, share)]].filter(([, value]) => value > 0);
  };
}

function timelinePicture(choice, width, ident, limit) {
  const line = timeline(choice);
  const { pp } = choice.plan;
  const isPhone = width <= 480;
  const lanes = lanesOf(pp);
  const [tall, thin] = pp === 1 ? [40, 16] : [20, 8];
  const left = pp === 1 ? (isPhone ? 60 : 106) : isPhone ? 42 : 66;
  const gap = line.skipped ? BREAK : 0;
  const heights = lanes.map((stage) => (stage === null ? 22 : tall + thin + (pp === 1 ? 6 : 9)));
  const tails = line.tail.map(([name, value]) => `${name} ${seconds(value)}`).join(", ");
  const description =
    `${choice.count} micro-batches on ${plural(pp, "pipeline stage")} take ${seconds(line.piped)}; then ${tails}. ` +
    overlaps(choice).map((row) => `${row.part}: ${seconds(row.hidden)} of ${seconds(row.whole)} hidden`).join("; ");
  const height = 6 + sum(heights) + 44;
  const svg = new Svg({ ident, width, height, title: `One step of ${choice.label}`, description });
  const [first, second] = line.cut;
  const rest = line.tail.at(-1)[1];
  const room = (width - left - 4) * Math.min(1, line.total / limit) - gap; // two compared plans have one scale
  const shown = line.total - (second - first);
  let scale = room / shown;
  if (rest * scale > REST) scale = (room - REST) / (shown - rest);
  const done = line.total - rest;
  const right = left + room + gap;
  const at = (time) => {
    if (time <= first) return left + time * scale;
    const end = left + gap + (done - second + first) * scale;
    if (time > done) return right - ((line.total - time) / rest) * (right - end);
    return left + gap + (time - second + first) * scale;
  };
  let y = 6;
  const base = 6 + sum(heights);
  lanes.forEach((stage, index) => {
    if (stage === null) svg.text(0, y + 15, `\u2026 ${pp - STAGES} more ${line.lane}s`, "muted");
    else lane(svg, line, stage, at, { left, y, tall, thin, right });
    y += heights[index];
  });
  if (line.skipped) breakMark(svg, left + first * scale, gap, base, line.skipped);
  const step = ticks(0, shown / 1e3, isPhone ? 4 : 9);
  const pace = 1e3 * (step.length > 1 ? step[1] - step[0] : line.total / 1e3);
  for (let index = 0; index * pace <= line.total; index++) {
    const time = index * pace;
    if (time > done || (time > first && time < second)) continue;
    const x = at(time);
    const torn = left + first * scale;
    svg.line(x, base, x, base + 5, "tick");
    if (x < right - 50 && !(gap && x > torn - 26 && x < torn + gap + 8)) {
      svg.text(x, base + 19, `${Number((time / 1e3).toPrecision(6))}`, "axis", "middle");
    }
  }
  svg.line(left, base, right, base, "tick");
  svg.text(right + 2, base + 19, seconds(line.total), "strong num", "end");
  svg.text(left, base + 38, "seconds since the step began", "axis");
  return svg;
}

function lane(svg, line, stage, at, { left, y, tall, thin, right }) {
  const { plan } = line.choice;
  const { pp, schedule } = plan;
  const low = y + tall + 2;
  if (pp === 1) {
    svg.text(0, y + tall / 2 + 4, "compute", "label");
    svg.text(0, low + thin / 2 + 4, left > 100 ? "communication" : "comm.", "label");
  } else {
    svg.text(0, y + tall / 2 + 5, left > 50 ? `${line.lane} ${stage}` : `${line.lane[0]}. ${stage}`, "label");
  }
  const lasts = [left, y, at(line.piped) - left, tall];
  if (pp > 1) svg.part(lasts, "bubble");
  else svg.rect(lasts, "lane");
  svg.rect([left, low, right - left, thin], "lane");
  const moved = sum(Object.values(line.shares));
  const ends = plan.stages.length - 1;
  const [sends, work, repeated] = [new Rects(), new Rects(), new Rects()];
  const labels = [];
  for (const event of line.events) {
    if (event.rank !== stage) continue;
    const x = at(event.start);
    const end = at(event.end);
    const length = end - x;
    const busy = length * (1 - moved);
    const color = event.kind === "F" ? "forward" : "backward";
    const name = `${event.kind}${event.microBatch}`;
    const title = () => `${OPERATIONS[event.kind]} of micro-batch ${event.microBatch}, stage ${event.stage}: ` +
      seconds(event.end - event.start);
    work.add([x, y, busy, tall], `${length > 6 ? "part " : ""}f-${color}`, title);
    const again = event.kind === "B" ? line.again * busy : 0;
    if (again > 1) {
      repeated.add([x, y, again, tall], "part f-recompute", () => `recompute, ${percent(line.again)} of the ${title()}`);
      if (data.hatched.includes("recompute")) repeated.add([x, y, again, tall], "hatch");
    }
    if (textWidth(name, 11.5, BOLD) + 3 < busy - again) labels.push([x + (busy + again) / 2, name, `inside t-${color}`]);
    if (pp > 1 && length - busy > 1) work.add([x + busy, y, length - busy, tall], "lane"); // not a bubble
    let from = x;
    for (const [part, share] of line.hidden(event)) {
      const wide = Math.min(share * busy, x + busy - from);
      if (wide > 0.3) work.add([from, low, wide, thin], `hidden f-${part}`, () => `${part}, hidden behind ${name}`);
      from += wide;
    }
    const isSent = event.kind === "F" ? event.stage < ends : event.kind !== "W" && event.stage > 0;
    const to = event.stage + (event.kind === "F" ? 1 : -1);
    if (pp > 1 && isSent && rankOfStage(schedule, to, pp) !== stage) {
      const wide = at(event.end + line.transfer) - end;
      const box = [end, low + thin - 3, wide, 3];
      if (wide > 0.4) sends.add(box, "hidden f-weights", () => `${name} to stage ${to}: ${seconds(line.transfer)}`);
    }
    from = x + busy;
    for (const [part, share] of Object.entries(line.shares)) {
      if (share * length > 0.2) {
        const box = [from, low, share * length, thin];
        work.add(box, `${share * length > 6 ? "part " : ""}f-${part}`, () => `${part}: ${percent(share)} of ${name}`);
      }
      from += share * length;
    }
  }
  for (const rects of [sends, work, repeated]) svg.rects(rects);
  for (const [x, name, kind] of labels) svg.text(x, y + tall / 2 + 4, name, kind, "middle");
  let start = line.piped;
  for (const [name, value] of line.tail) {
    const [top, height] = name === "data" ? [low, thin] : [y, tall];
    const [x, length] = [at(start), at(start + value) - at(start)];
    svg.part([x, top, length, height], name, { title: `${name}, not hidden: ${seconds(value)}` });
    if (pp === 1 && textWidth(name, 11.5, BOLD) + 8 < length) svg.text(x + 5, top + height / 2 + 4, name, `inside t-${name}`);
    start += value;
  }
}

// A torn strip in place of the omitted micro-batches.
function breakMark(svg, x, gap, base, skipped) {
  const pairs = Math.max(1, Math.round((base - 2) / 20));
  const high = at2((base - 2) / pairs / 2);
  const down = `l5 ${high}l-5 ${high}`.repeat(pairs);
  const up = `l5 -${high}l-5 -${high}`.repeat(pairs);
  svg.path(`M${at2(x)} 2${down}h${at2(gap)}${up}z`, "torn");
  svg.text(x + gap / 2, base / 2 - 2, "\u2026", "strong", "middle");
  svg.text(x + gap / 2, base / 2 + 13, `${skipped} more`, "label", "middle");
}
