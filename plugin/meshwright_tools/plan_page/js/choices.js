// What the page knows of a plan at a setting of the sliders, decoded from the page's data.

const SLIDERS = ["batch", "length", "gpus", "micro"];
const words = (codes) => codes.map((index) => data.words[index]).join(" ");

function settingIndex(setting) {
  return SLIDERS.reduce((index, name, slider) => index * data.sliders[name].length + setting[slider], 0);
}

// Returns a plan's label, memory and time at a setting, or the reason why it cannot run there.
function choiceAt(index, setting) {
  const known = (data.known ??= new Map());
  const key = `${index}/${settingIndex(setting)}`;
  if (!known.has(key)) known.set(key, decoded(index, setting));
  return known.get(key);
}

function decoded(index, setting) {
  const plan = data.plans[index];
  const point = plan.points[settingIndex(setting)];
  const [codes, , , dp, replicate, microBatch, count] = data.labels[plan.label];
  const of = { index, plan, label: words(codes), fits: false, dp, replicate, microBatch, count };
  if (!Array.isArray(point)) return { ...of, reason: data.reasons[point] };
  const [at, memory, work, ...times] = point;
  const label = data.labels[at];
  const groups = data.memories[memory].map(([first, last, parts]) => ({
    first,
    last,
    parts: parts.length > 2 ? parts : null, // of stages without a bar only the least and the largest total is known
    total: parts.length > 2 ? sum(parts) : parts[1],
    least: parts.length > 2 ? sum(parts) : parts[0],
  }));
  const choice = {
    ...of,
    label: words(label[0]),
    words: `${data.ranks[label[1]]}, ${data.rows[label[2]]}`.replaceAll(" x ", " \u00d7 "),
    dp: label[3],
    replicate: label[4],
    microBatch: label[5],
    count: label[6],
    groups,
    memory: Math.max(...groups.map((group) => group.total)),
    setting,
  };
  if (work === undefined) return choice;
  const time = sum(times);
  const [batch, length, gpus] = setting.map((at, slider) => data.sliders[SLIDERS[slider]][at]);
  const speed = (batch * length) / (time / 1e3) / gpus;
  const mfu = (data.flopsPerToken[setting[1]] * speed) / data.device.flops;
  return { ...choice, fits: true, times, time, speed, mfu, work: data.works[work] };
}

const timeOf = (choice, name) => choice.times[data.timeParts.indexOf(name)];
const COMPUTE = ["matmul", "attention", "elementwise", "recompute"];
const COMMUNICATION = ["tensor", "context", "experts", "data"];
const shareOf = (choice, names) => sum(names.map((name) => timeOf(choice, name))) / choice.time;

// Returns the plan's seconds of forward and backward for a micro-batch on the slowest rank, and the layers it holds.
function slowestRank({ plan, work: [layer, head] }) {
  const last = plan.stages.length - 1;
  const ranks = plan.held.map((stages) => {
    const layers = sum(stages.map((stage) => plan.stages[stage]));
    const heads = stages.includes(last) ? 1 : 0;
    return { layers, forward: layers * layer[0] + heads * head[0], backward: layers * layer[1] + heads * head[1] };
  });
  return ranks.reduce((slow, rank) => (rank.forward + rank.backward > slow.forward + slow.backward ? rank : slow));
}

// Returns, for each kind of communication, its time in a step and how much of it compute hides.
function overlaps(choice) {
  const { plan, count, work } = choice;
  const [layer, , transfer, , shares, , dataParallel] = work;
  const slow = slowestRank(choice);
  const rows = [];
  const tensor = timeOf(choice, "tensor");
  if (tensor) rows.push({ part: "tensor", over: "tp", whole: tensor, hidden: 0, behind: "nothing" });
  const context = timeOf(choice, "context");
  const behind = shares[2] * (layer[0] + layer[1]) * slow.layers * count;
  if (context) rows.push({ part: "context", over: "cp", whole: context + behind, hidden: behind, behind: "attention" });
  const experts = timeOf(choice, "experts");
  if (experts) rows.push({ part: "experts", over: "ep", whole: experts, hidden: 0, behind: "nothing" });
  for (const [phase, isRepeated, whole, exposed] of dataParallel) {
    const times = isRepeated ? count : 1;
    const when = isRepeated ? phase : `${phase} of ${phase === "forward" ? "the first" : "the last"} micro-batch`;
    rows.push({ part: "data", over: "dp", whole: times * whole, hidden: times * (whole - exposed), behind: when });
  }
  if (plan.pp > 1) {
    const sent = 2 * count * transfer;
    rows.push({ part: "pipeline", over: "pp", whole: sent, hidden: sent, behind: "other micro-batches, or in the bubble" });
  }
  return rows;
}
