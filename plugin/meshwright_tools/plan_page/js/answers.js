// The page's sentences and tables: what limits a plan, where its ranks sit, and how it differs from another plan.

const AXIS_NAMES = { pp: "pipeline stage", dp: "data", cp: "context", tp: "tensor" };

function limits(choice) {
  const [most, time] = data.timeParts.map((name, index) => [name, choice.times[index]]).sort((a, b) => b[1] - a[1])[0];
  const shares = [COMPUTE, COMMUNICATION, ["bubble"]].map((names) => shareOf(choice, names));
  const kinds = ["Compute", "Communication", "The pipeline's bubble"];
  const first = shares.indexOf(Math.max(...shares));
  const others = ["compute", "communication that nothing hides", "bubble"]
    .map((name, index) => `${name} ${percent(shares[index])}`)
    .filter((_, index) => index !== first && (index < 2 || choice.plan.pp > 1));
  const rest = 1 - sum(shares);
  return `${kinds[first]}: ${percent(shares[first])} of the step, most of it ${most} (${percent(time / choice.time)}); ` +
    `${others.join(", ")}, other ${percent(Math.max(0, rest))}.`;
}

function placement(choice) {
  const sizes = sizesOf(choice);
  const inNode = data.gpusPerNode;
  const sentences = [];
  let stride = 1;
  for (const axis of ["tp", "cp", "dp", "pp"]) {
    const size = sizes[axis];
    if (size > 1) {
      const isInside = stride * size <= inNode;
      const nodes = Math.max(1, Math.round((stride * size) / inNode));
      const where = isInside ? "inside a node" : stride >= inNode ? `each on another node` : `over ${nodes} nodes`;
      sentences.push(axis === "pp" && stride >= inNode
        ? `each of ${size} stages has ${plural(stride / inNode, "node")}`
        : `${axis}=${size} ${where}`);
    }
    stride *= size;
  }
  const shards = shardOf(choice, { dp: 0, cp: 0 });
  if (shards) {
    const kept = ["", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and weights"];
    sentences.push(`each rank keeps 1/${shards[1]} of the ${kept[choice.plan.zero]}`);
  }
  return sentences.length ? `${sentences.join("; ")}.` : "One rank.";
}

function nextBest(choice, ordered) {
  const next = ordered.find((other) => other.fits && other.index !== choice.index);
  if (!next) return "No other plan of the table fits.";
  const longer = next.time / choice.time - 1;
  const tie = Math.abs(longer) <= data.tie ? ", a tie" : "";
  return `${next.label}: ${longer >= 0 ? "+" : "\u2212"}${percent(Math.abs(longer), 1)} time${tie}, ${gib(next.memory)}.`;
}

// What twice the batch does: the search's own answer for the planned job, otherwise the table's.
function twiceTheBatch(choice, setting, isPlanned) {
  const change = data.changes.find(([what]) => what === "twice the global batch");
  if (isPlanned && change) {
    const [, plan, speed] = change;
    return plan === "no plan fits" ? "No plan fits." : `Best plan: ${plan}; ${speed} the tokens/s.`;
  }
  const larger = [setting[0] + 1, ...setting.slice(1)];
  if (larger[0] >= data.sliders.batch.length) return "Beyond the slider; plan it with the command below.";
  const after = choiceAt(choice.index, larger);
  if (after.reason) return `This plan cannot run: ${after.reason}.`;
  if (!after.fits) return `This plan no longer fits: it needs ${gib(after.memory)}.`;
  return `This plan takes ${seconds(after.time)}, ${(after.speed / choice.speed).toFixed(2)}\u00d7 the tokens/s.`;
}

function difference(ratio) {
  if (ratio > 3) return `${ratio.toFixed(1)}\u00d7`;
  return `${ratio >= 1 ? "+" : "\u2212"}${percent(Math.abs(ratio - 1), 1)}`;
}

const fullest = (choice) => choice.groups.find((group) => group.parts && group.total === choice.memory);

function comparison(one, two) {
  const [time, memory] = [[], []];
  const row = (rows, name, text, pick) => {
    const [a, b] = [pick(one), pick(two)];
    const change = a > 0 && b > 0 ? difference(b / a) : "";
    if (a > 0 || b > 0) rows.push([name, ...[a, b].map((value) => (value > 0 ? text(value) : "none")), change]);
  };
  if (one.fits && two.fits) {
    row(time, "step time", seconds, (choice) => choice.time);
    row(time, "tokens/s/GPU", grouped, (choice) => choice.speed);
    row(time, "MFU", (value) => percent(value, 1), (choice) => choice.mfu);
    data.timeParts.forEach((name, part) => row(time, name, seconds, (choice) => choice.times[part]));
  }
  row(memory, "memory", gib, (choice) => choice.memory);
  data.memoryParts.forEach((name, part) => row(memory, name, gib, (choice) => fullest(choice).parts[part]));
  const parts = [["Time of the two plans", time], ["Memory of the fullest rank of the two plans", memory]];
  return parts.filter(([, rows]) => rows.length)
    .map(([caption, rows]) => table(caption, ["", "A", "B", "B against A"], rows)).join("");
}

// The diagrams as tables, for readers who cannot see them.
const asTables = {
  memory: (choices) => choices.map((choice) => table(
    `Memory of the ranks of ${choice.label}`,
    ["ranks", "total", ...data.memoryParts],
    choice.groups.map((group) => [
      groupLabel(choice, group), gib(group.total), ...(group.parts ?? data.memoryParts.map(() => NaN)).map((value) =>
        Number.isNaN(value) ? "" : gib(value)),
    ]),
  )).join(""),
  time: (choices, ordered) => table(
    "Step time of the plans", ["plan", "total", ...data.timeParts],
    ordered.filter((choice) => choice.fits).map((choice) => [choice.label, seconds(choice.time), ...choice.times.map(seconds)]),
  ),
  timeline: (choices) => choices.map((choice) => table(
    `Communication of ${choice.label}, in a step of the slowest rank`,
    ["communication", "over", "whole", "hidden", "not hidden", "hidden behind"],
    overlaps(choice).map((row) =>
      [row.part, row.over, seconds(row.whole), seconds(row.hidden), seconds(row.whole - row.hidden), row.behind]),
  )).join(""),
  ranks: (choices) => choices.map((choice) => {
    const gpus = Math.min(64, data.sliders.gpus[choice.setting[2]]);
    const rows = Array.from({ length: gpus }, (_, rank) => {
      const places = coordinates(choice, rank);
      const shard = shardOf(choice, places);
      return [`rank ${rank}`, Math.floor(rank / data.gpusPerNode), ...Object.values(places), shard ? `${shard[0]} of ${shard[1]}` : "all"];
    });
    return table(`The first ${gpus} ranks of ${choice.label}`, ["rank", "node", "pp", "dp", "cp", "tp", "shard"], rows);
  }).join(""),
  front: (choices, ordered) => table(
    "Memory and time of the plans", ["plan", "memory", "step"],
    ordered.filter((choice) => choice.fits).map((choice) => [choice.label, gib(choice.memory), seconds(choice.time)]),
  ),
};

// The entries of the legends, as [part, name, words].
const legends = {
  memory: (choices) => {
    const most = (part) => Math.max(...choices.flatMap(({ groups }) => groups.map((group) => group.parts?.[part] ?? 0)));
    const value = (part) => fullest(choices[0]).parts[part];
    return data.memoryParts.map((name, part) => [name, name, part])
      .filter(([, , part]) => most(part) > 0)
      .map(([name, , part]) => [name, name, value(part) > 0 ? gib(value(part)) : "in other bars"]);
  },
  time: ([choice], ordered) => data.timeParts
    .map((name, part) => [name, name, choice.times[part], part])
    .filter(([, , , part]) => drawnTimes(ordered, [choice.index]).some((other) => other.times[part] > 0))
    .map(([part, name, value]) => [part, name, value > 0 ? seconds(value) : "none"]),
  timeline: (choices) => {
    const has = (name) => choices.some((choice) => timeOf(choice, name) > 0);
    const isPiped = choices.some((choice) => choice.plan.pp > 1);
    return [
      ["forward", "", "forward (F)"], ["backward", "", isPiped ? "backward (B, or I and W)" : "backward (B)"],
      ...(has("recompute") ? [["recompute", "", "recompute"]] : []),
      ...COMMUNICATION.filter(has).map((name) => [name, "", `${name} communication`]),
      ...(choices.some((choice) => overlaps(choice).some((row) => row.hidden > 0))
        ? [["hidden-sample", "", "faint: hidden behind the compute above it"]] : []),
      ...(isPiped ? [["weights", "", "sent to the next stage"], ["bubble", "", "bubble"]] : []),
      ["optimizer", "", "optimizer"], ["other", "", "fixed cost and stragglers"],
    ];
  },
  ranks: (choices) => {
    const used = Object.keys(AXIS_NAMES).filter((axis) => choices.some((choice) => sizesOf(choice)[axis] > 1));
    const each = (text) => [...new Set(choices.map(text).filter(Boolean))].join(" and ");
    const entries = (used.length ? used : ["dp"]).map((axis) => {
      const tokens = axis === "cp" ? ": each rank has its share of a sequence's tokens" : "";
      return [data.axes[axis], axis, `${AXIS_NAMES[axis]}, ${each((choice) => span(0, sizesOf(choice)[axis] - 1))}${tokens}`];
    });
    const shards = each((choice) => shardOf(choice, { dp: 0, cp: 0 })?.[1]);
    const stages = each((choice) => (choice.plan.zero ? `ZeRO-${choice.plan.zero}` : ""));
    if (shards) entries.push(["optimizer", stages, `the bar shows which of ${shards} shards a rank keeps`]);
    return entries;
  },
  front: () => [],
};
