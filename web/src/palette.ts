// Colours: runs (Okabe-Ito, with dash patterns and markers so that colour is never alone) and scales for matrices.
import { interpolateRgbBasis, piecewise, interpolateLab } from "d3";

export const RUN_COLOURS = 7;
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2"];
const SYMBOLS = ["circle", "square", "triangle", "diamond2", "cross", "star", "wye"] as const;

export interface RunStyle {
  colour: string;
  dash: string;
  symbol: (typeof SYMBOLS)[number];
}

export function runStyle(index: number): RunStyle {
  const turn = Math.floor(index / RUN_COLOURS);
  return {
    colour: `var(--run-${index % RUN_COLOURS})`,
    dash: DASHES[(index + turn) % DASHES.length] ?? "",
    symbol: SYMBOLS[index % SYMBOLS.length] ?? "circle",
  };
}

const SEQUENTIAL = {
  light: ["#f3f5f8", "#c8dcee", "#7fb2d9", "#2f7cb8", "#0b3f74", "#04203f"],
  dark: ["#1d232c", "#1f3a57", "#23608f", "#3d90cc", "#93c9f0", "#e6f4ff"],
};
const DIVERGING = {
  light: ["#7a3300", "#c9650f", "#efae6e", "#f4f2ef", "#84b6dc", "#2a77b4", "#063a6b"],
  dark: ["#ffd3a1", "#e08a35", "#80450f", "#22272f", "#1f567f", "#4b9ad4", "#c9e6ff"],
};

type Interpolator = (share: number) => string;
const sequential = {
  light: interpolateRgbBasis(SEQUENTIAL.light),
  dark: interpolateRgbBasis(SEQUENTIAL.dark),
};
const diverging: { light: Interpolator; dark: Interpolator } = {
  light: piecewise(interpolateLab, DIVERGING.light),
  dark: piecewise(interpolateLab, DIVERGING.dark),
};

export type ScaleKind = "sequential" | "diverging";

export interface Domain {
  low: number;
  high: number;
}

/** A colour of both themes; the browser takes the one that applies, so a change of theme redraws nothing. */
export function cellColour(value: number, kind: ScaleKind, domain: Domain): string {
  const scales = kind === "diverging" ? diverging : sequential;
  const range = domain.high - domain.low || 1;
  const share = Math.min(1, Math.max(0, (value - domain.low) / range));
  return `light-dark(${scales.light(share)}, ${scales.dark(share)})`;
}

/** For a diverging scale around 0 the domain is symmetric. */
export function domainOf(values: Iterable<number>, kind: ScaleKind, clip = 0.99): Domain {
  const known = [...values].filter(Number.isFinite);
  if (!known.length) return { low: kind === "diverging" ? -1 : 0, high: 1 };
  if (kind === "sequential") {
    const sorted = known.sort((a, b) => a - b);
    const high = sorted[Math.min(sorted.length - 1, Math.ceil(clip * sorted.length) - 1)] ?? 1;
    return { low: Math.min(0, sorted[0] ?? 0), high: high > 0 ? high : Math.max(sorted.at(-1) ?? 1, 1e-9) };
  }
  const sizes = known.map(Math.abs).sort((a, b) => a - b);
  const limit = sizes[Math.min(sizes.length - 1, Math.ceil(clip * sizes.length) - 1)] || sizes.at(-1) || 1;
  return { low: -limit, high: limit };
}
