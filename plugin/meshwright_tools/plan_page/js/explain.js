// What the words of a plan mean, for the titles over them.

const MEANINGS = [
  [/^dp(\d+)(?:\((\d+)x(\d+)\))?$/, (n, groups, size) => `the batch is split over ${plural(n, "data-parallel rank")}` +
    (groups ? `; ${groups} groups of ${size} each share a state` : "")],
  [/^tp(\d+)(\+sp)?$/, (n, sp) => `each layer is split over ${n} ranks${sp ? ", and the tokens between the layers too" : ""}`],
  [/^cp(\d+)(?:\((.*)\))?$/, (n, how) => `each sequence is split over ${n} ranks${how ? `; attention by ${how}` : ""}`],
  [/^ep(\d+)$/, (n) => `the experts are split over ${n} of these ranks`],
  [/^etp(\d+)$/, (n) => `each expert is split over ${n} ranks`],
  [/^pp(\d+)(?:\((.*)\))?(?:x(\d+))?$/, (n, how, v) => `the layers are split into ${plural(n * (v ?? (how === "zbv" ? 2 : 1)), "stage")} ` +
    `on ${n} ranks${how || v ? `; schedule ${how ?? "interleaved"}` : ""}`],
  [/^stages=(.*)$/, (text) => `layers of the stages in order: ${text.replaceAll(/(\d+)x(\d+)/g, "$1 times $2").replaceAll("-", ", ")}`],
  [/^zero0$/, () => "no ZeRO: every data-parallel rank has the whole optimizer state"],
  [/^zero1$/, () => "ZeRO 1: each data-parallel rank keeps its part of the optimizer state"],
  [/^zero2$/, () => "ZeRO 2: each data-parallel rank keeps its part of the optimizer state and the gradients"],
  [/^zero3$/, () => "ZeRO 3: each data-parallel rank keeps its part of the optimizer state, the gradients and the weights"],
  [/^mb(\d+)(?:x(\d+))?$/, (rows, count) => `${count === undefined ? "micro-batches" : plural(count, "micro-batch").replace(/hs$/, "hes")} of ` +
    plural(rows, "sequence")],
  [/^ga(\d+)$/, (n) => `${n} micro-batches per step`],
  [/^recompute=full(?:\((\d+)\))?$/, (n) => `activations of ${n ? `${plural(n, "layer")} of each rank` : "every layer"} are computed again in the backward`],
  [/^recompute=selective$/, () => "attention is computed again in the backward"],
  [/^reduce=bf16$/, () => "gradients travel in bfloat16"],
  [/^offload=optimizer$/, () => "the optimizer's state is in the memory of the host, which steps it"],
];

// Returns one line for each word of a plan that has a meaning.
function meaning(label) {
  const lines = label.split(" ").map((word) => {
    for (const [pattern, text] of MEANINGS) {
      const found = pattern.exec(word);
      if (found) return `${word}: ${text(...found.slice(1).map((part) => (/^\d+$/.test(part) ? Number(part) : part)))}`;
    }
    return null;
  });
  return lines.filter(Boolean).join("\n");
}
