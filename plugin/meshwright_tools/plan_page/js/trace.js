// The step of a plan as a trace that Perfetto and chrome://tracing open: one thread for each rank of the pipeline.

const MOST_EVENTS = 40000; // of more micro-batches, the file has the first

function traceOf(choice) {
  const { plan, work } = choice;
  const [of, transfer] = [stageTimes(choice), work[2]];
  const { pp, schedule, chunks } = plan;
  const fitting = Math.floor(MOST_EVENTS / (3 * plan.stages.length));
  // Interleaved schedules take whole rounds of pp micro-batches.
  const count = choice.count <= fitting ? choice.count : Math.max(pp, fitting - (fitting % pp));
  const events = simulate({ schedule, p: pp, v: chunks, m: count, times: of, transfer });
  const lane = (rank) => ({ name: "thread_name", ph: "M", pid: 0, tid: rank, args: { name: `pipeline rank ${rank}` } });
  const piece = (event) => ({
    name: `${event.kind}${event.microBatch}`, cat: OPERATIONS[event.kind], ph: "X", pid: 0, tid: event.rank,
    ts: 1e3 * event.start, dur: 1e3 * (event.end - event.start), args: { stage: event.stage, microBatch: event.microBatch },
  });
  let start = Math.max(...events.map((event) => event.end));
  const tail = ["data", "optimizer", "other"].flatMap((name) => {
    const dur = timeOf(choice, name);
    start += dur;
    return dur ? Array.from({ length: pp }, (_, rank) => ({
      name, cat: "not hidden", ph: "X", pid: 0, tid: rank, ts: 1e3 * (start - dur), dur: 1e3 * dur })) : [];
  });
  return { displayTimeUnit: "ms", otherData: { plan: choice.label, microBatches: `${count} of ${choice.count}` },
    traceEvents: [...Array.from({ length: pp }, (_, rank) => lane(rank)), ...events.map(piece), ...tail] };
}

function saveTrace(choice) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(traceOf(choice))], { type: "application/json" }));
  link.download = `${choice.label.replaceAll(/[^\w.+-]+/g, "_")}.trace.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
