// Does what has much weight also matter? The rule that the page states and applies.
import type { Effect } from "./types";

export const LARGE_MASS = 0.1;

export type Judgement =
  | "matters"
  | "large weight but no effect"
  | "small weight but matters"
  | "small weight, no effect"
  | "no more than random cuts"
  | "not told apart from random cuts"
  | "harmful"
  | "undecided";

export const RULE =
  "A cut matters if the whole interval of its change of loss lies above 0 and above every random control with as many edges. " +
  "If the interval lies above 0 but not above every control, the mean decides: among the controls or below them, the cut does " +
  "no more than random cuts; above all of them, it is not told apart from random cuts. " +
  "Families are cut in rows of at least four sources. Single sources and routes have no random cuts beside them: each interval " +
  "stands for itself, and about one in forty lies above 0 by chance. " +
  `A weight is large from ${LARGE_MASS} of the rows that were cut.`;

/** Applies RULE to one effect. */
export function judge(effect: Effect): Judgement {
  const { mean, low, high } = effect.loss;
  if (low === null || high === null) return "undecided";
  const large = (effect.mass ?? 0) >= LARGE_MASS;
  if (high < 0) return "harmful";
  const controls = effect.controls?.loss ?? [];
  if (low > 0 && low > Math.max(0, ...controls)) return large ? "matters" : "small weight but matters";
  if (low > 0) return mean <= Math.max(...controls) ? "no more than random cuts" : "not told apart from random cuts";
  return large ? "large weight but no effect" : "small weight, no effect";
}

const SENTENCES: Record<Judgement, string> = {
  matters: "It has much weight and it matters: without it the loss rises.",
  "large weight but no effect":
    "It has much weight, but cutting it changes the loss by nothing that can be told from 0.",
  "small weight but matters": "It has little weight, but it matters: without it the loss rises.",
  "small weight, no effect": "It has little weight, and cutting it changes nothing that can be told from 0.",
  "no more than random cuts": "Cutting it raises the loss, but no more than random cuts of as many edges do.",
  "not told apart from random cuts":
    "Cutting it raises the loss, on average more than every random cut of as many edges, but its interval reaches down to theirs, so it is not told apart from them.",
  harmful: "Without it the loss is lower.",
  undecided: "There is no interval (one sequence only), so nothing is decided.",
};

export function judgementSentence(effect: Effect): string {
  return SENTENCES[judge(effect)];
}

export function controlsText(
  controls: { count: number; loss: number[] } | null,
  format: (value: number) => string,
): string {
  if (!controls || !controls.loss.length) return "none";
  const mean = controls.loss.reduce((sum, value) => sum + value, 0) / controls.loss.length;
  return `${controls.count}: mean ${format(mean)}, ${format(Math.min(...controls.loss))} to ${format(Math.max(...controls.loss))}`;
}
