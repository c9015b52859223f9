// How the edits change the loss of each token.
import * as Plot from "@observablehq/plot";
import { change, shorten, token } from "../format";
import type { RunAnswer } from "../types";

export function changes(answer: RunAnswer): (number | null)[] {
  const { plain, edited } = answer;
  return plain.token_loss.map((value, index) => {
    const after = edited?.token_loss[index] ?? null;
    return value === null || after === null ? null : after - value;
  });
}

export function changeChart(width: number, answer: RunAnswer): Plot.PlotOptions {
  const data = changes(answer).map((value, index) => ({
    index,
    value: value ?? NaN,
    text: token(answer.table.tokens[index] ?? ""),
  }));
  return {
    height: 170,
    marginLeft: 52,
    marginBottom: 34,
    marginTop: 22,
    x: {
      label: "token",
      labelAnchor: "center",
      labelArrow: "none",
      ticks: Math.floor(width / 60),
      tickFormat: (value: number) => (Number.isInteger(value) ? String(value + 1) : ""),
    },
    y: { label: "change of loss (nats)", grid: true, labelArrow: "none", ticks: 4 },
    marks: [
      Plot.ruleY([0], { stroke: "var(--line-strong)" }),
      Plot.rectY(
        data.filter((each) => Number.isFinite(each.value)),
        {
          x1: (each: { index: number }) => each.index - 0.5,
          x2: (each: { index: number }) => each.index + 0.5,
          y: "value",
          insetLeft: 0.5,
          insetRight: 0.5,
          fill: (each: { value: number }) => (each.value > 0 ? "var(--run-2)" : "var(--run-1)"),
          title: (each: { index: number; text: string; value: number }) =>
            `${each.index + 1}: ${shorten(each.text, 30)}\n${change(each.value)}`,
          tip: { fill: "var(--card)", stroke: "var(--line-strong)" },
        },
      ),
    ],
    color: { type: "identity" },
  };
}
