// Numbers and texts as a reader sees them.

const MINUS = "−";

function signed(text: string): string {
  return text.replace("-", MINUS);
}

/** A number in at most `digits` significant digits; "–" where there is none. */
export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : `${MINUS}∞`;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) {
    const [mantissa, exponent] = value.toExponential(Math.max(0, digits - 2)).split("e");
    return signed(`${Number(mantissa)}e${Number(exponent)}`);
  }
  if (size >= 10 ** digits) return signed(Math.round(value).toLocaleString("en-US"));
  return signed(String(Number(value.toPrecision(digits))));
}

/** A loss or a change of one: four decimals always, so that columns align. */
export function loss(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return Number.isFinite(value) ? signed(value.toFixed(4)) : number(value);
}

/** A change, with its sign. */
export function change(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return number(value ?? null);
  const size = Math.abs(value);
  const text = size > 0 && size < 0.0005 ? size.toExponential(1) : size.toFixed(size < 0.1 ? 4 : 3);
  if (Number(text) === 0) return "0";
  return (value < 0 ? MINUS : "+") + signed(text);
}

/** "+0.120 (+0.100 to +0.140)", without the bracket where there is no interval. */
export function interval(value: { mean: number; low: number | null; high: number | null }): string {
  if (value.low === null || value.high === null) return change(value.mean);
  return `${change(value.mean)} (${change(value.low)} to ${change(value.high)})`;
}

export function percent(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const points = 100 * value;
  return `${number(points, Math.abs(points) < 1 ? 2 : 3)} %`;
}

export function count(value: number): string {
  return Math.round(value).toLocaleString("en-US");
}

/** "1 token", "1,024 tokens". */
export function plural(value: number, noun: string): string {
  return `${count(value)} ${noun}${Math.round(value) === 1 ? "" : "s"}`;
}

/** 614400 → "614k", for axes. */
export function short(value: number): string {
  for (const [size, letter] of [
    [1e12, "T"],
    [1e9, "B"],
    [1e6, "M"],
    [1e3, "k"],
  ] as const) {
    if (Math.abs(value) >= size) return signed(`${Number((value / size).toPrecision(3))}${letter}`);
  }
  return number(value);
}

export function duration(seconds: number): string {
  if (seconds < 60) return `${number(seconds, 2)} s`;
  if (seconds < 3600) return `${number(seconds / 60, 2)} min`;
  return `${number(seconds / 3600, 2)} h`;
}

function pointName(point: number): string {
  return `⟨U+${point.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

function visiblePoint(character: string): string {
  const point = character.codePointAt(0) ?? 0;
  if (character === "\n") return "⏎";
  if (character === "\t") return "⇥";
  if (point < 0x20) return String.fromCodePoint(0x2400 + point);
  if (point === 0x7f) return "␡";
  return pointName(point);
}

// Controls, what reorders or hides text, and what no XML file may contain. Joiners of emoji stay.
const HIDDEN =
  /[\u0000-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060\u2066-\u2069\ufeff\ufffe\uffff]/g;
const LONE = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/** Text in which control characters are symbols, so that nothing acts and nothing is invisible. */
export function visible(text: string): string {
  return text.replace(LONE, "\ufffd").replace(HIDDEN, visiblePoint);
}

/** A token: as `visible`, and one of white space only shows it. */
export function token(text: string): string {
  if (text === "") return "∅";
  const shown = visible(text);
  if (/^[\s⏎⇥]*$/u.test(shown)) return shown.replace(/[ \u00a0\u2000-\u200a\u3000]/g, "␣");
  return /^\p{M}/u.test(shown) ? `◌${shown}` : shown;
}

export function shorten(text: string, length: number): string {
  const letters = [...text];
  return letters.length <= length ? text : `${letters.slice(0, length - 1).join("")}…`;
}

/** A sentence with its full stop. */
export function ended(text: string): string {
  return text.replace(/([^.!?…])$/, "$1.");
}

/** A name for a file: letters, digits and dashes. */
export function fileName(...parts: string[]): string {
  const name = parts
    .join("-")
    .toLowerCase()
    .replace(/[^a-z0-9]+/g, "-")
    .replace(/^-+|-+$/g, "");
  return name.slice(0, 120) || "figure";
}
