// The pipeline schedules and their simulation: the same operations and times as meshwright/plan/schedule.py and
// meshwright_plan/time/simulate.py, to which a test compares them.

const repeat = (visits, count) => Array.from({ length: Math.max(0, count) }, () => visits).flat();
const rankOfStage = (schedule, stage, p) =>
  schedule === "zbv" ? (stage < p ? stage : 2 * p - 1 - stage) : stage % p;

const VISITS = {
  gpipe: (rank, p, v, m) => [...repeat([["F", rank]], m), ...repeat([["B", rank]], m)],

  "1f1b": (rank, p, v, m) => {
    const warm = Math.min(p - 1 - rank, m);
    const [forward, backward] = [["F", rank], ["B", rank]];
    return [...repeat([forward], warm), ...repeat([forward, backward], m - warm), ...repeat([backward], warm)];
  },

  interleaved: (rank, p, v, m) => {
    const stages = Array.from({ length: v }, (_, chunk) => rank + chunk * p);
    const groups = (kind, order) => repeat(order.flatMap((stage) => repeat([[kind, stage]], p)), Math.floor(m / p));
    const forwards = groups("F", stages);
    const backwards = groups("B", [...stages].reverse());
    const warm = Math.min(2 * (p - 1 - rank) + (v - 1) * p, m * v);
    const steady = forwards.slice(warm).flatMap((forward, index) => [forward, backwards[index]]);
    return [...forwards.slice(0, warm), ...steady, ...backwards.slice(m * v - warm)];
  },

  "zb-h1": (rank, p, v, m) => {
    const warm = Math.min(p - 1 - rank, m);
    const visits = repeat([["F", rank]], warm);
    for (let index = 0; index < m; index++) {
      if (index < m - warm) visits.push(["F", rank]);
      visits.push(["I", rank]);
      if (index >= rank) visits.push(["W", rank]);
    }
    return [...visits, ...repeat([["W", rank]], Math.min(rank, m))];
  },

  zbv: (rank, p, v, m) => {
    const enough = Math.max(2 * p - 1, m);
    const [down, up] = [rank, 2 * p - 1 - rank];
    const paid = [["I", down], ["W", down]];
    const through = [["F", up], ["I", up], ["W", up]];
    return [
      ...repeat([["F", down]], 2 * (p - rank) - 1),
      ...repeat([["F", up], ["F", down]], rank),
      ...repeat(through, p - rank),
      ...repeat([["F", down], ...paid, ...through], enough - 2 * p + rank + 1),
      ...repeat([...paid, ...through], p - rank - 1),
      ...repeat([["I", down], ["I", up]], rank),
      ...repeat(paid, p - rank),
      ...repeat([["W", up]], rank),
      ...repeat([["W", down]], rank),
    ];
  },
};

// Returns the operations of a rank as [kind, virtual stage, micro-batch].
function operations(schedule, rank, p, v, m) {
  const counts = new Map();
  const found = [];
  for (const visit of VISITS[schedule](rank, p, v, m)) {
    const key = 8 * visit[1] + "FBIW".indexOf(visit[0]);
    const microBatch = counts.get(key) ?? 0;
    counts.set(key, microBatch + 1);
    if (microBatch < m) found.push([...visit, microBatch]);
  }
  return found;
}

// Returns when each operation runs, rank by rank, given the times of each virtual stage by kind of operation.
function simulate({ schedule, p, v, m, times, transfer }) {
  const lists = Array.from({ length: p }, (_, rank) => operations(schedule, rank, p, v, m));
  const events = lists.map(() => []);
  const clock = Array(p).fill(0);
  const last = p * v - 1;
  const ends = new Float64Array(2 * p * v * m).fill(-1); // of a forward, or of a backward to the input
  const place = (isForward, stage, microBatch) => ((isForward ? 0 : p * v) + stage) * m + microBatch;
  for (let isStuck = false; !isStuck; ) {
    isStuck = true;
    lists.forEach((list, rank) => {
      while (events[rank].length < list.length) {
        const [kind, stage, microBatch] = list[events[rank].length];
        const isForward = kind === "F";
        let start = clock[rank];
        if (kind !== "W" && !(isForward && stage === 0)) {
          const before = isForward ? stage - 1 : stage === last ? stage : stage + 1;
          const ready = ends[place(isForward || stage === last, before, microBatch)];
          if (ready < 0) break;
          start = Math.max(start, ready + (rankOfStage(schedule, before, p) !== rank ? transfer : 0));
        }
        clock[rank] = start + times[kind][stage];
        if (kind !== "W") ends[place(isForward, stage, microBatch)] = clock[rank];
        events[rank].push({ rank, kind, stage, microBatch, start, end: clock[rank] });
        isStuck = false;
      }
    });
  }
  return events.flat();
}
