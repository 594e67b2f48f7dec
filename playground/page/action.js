// The names of actions: 2F0, (2F3;1B0), 1SEND_F2, 0R.

const PART = /(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|[FBIWR])(\d*)/g;
const KIND = {
  F: "forward",
  B: "backward",
  I: "backward for the input",
  W: "backward for the weights",
  R: "reduction of the gradients",
  SEND_F: "sending of the activations",
  RECV_F: "receiving of the activations",
  SEND_B: "sending of the gradient",
  RECV_B: "receiving of the gradient",
};

const known = new Map(); // the parts of the actions seen so far

// Return the parts of an action: two of a pair, one of any other.
export function parts(name) {
  let found = known.get(name);
  if (!found) {
    found = [...name.matchAll(PART)].map(([, stage, kind, micro_batch]) => ({ stage: +stage, kind, micro_batch }));
    known.set(name, found);
  }
  return found;
}

// Describe an action in words.
export function describe(name) {
  const words = parts(name).map(({ stage, kind, micro_batch }) =>
    kind === "R" ? `${KIND.R} of stage ${stage}` : `${KIND[kind]} of micro-batch ${micro_batch} in stage ${stage}`);
  return words.length === 1 ? words[0] : `${words.join(" and ")}, which overlap`;
}

export function computes(name) {
  return !/[_R]/.test(name);
}
