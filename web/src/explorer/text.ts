// Whether a chosen file is a text.
import { percent, visible } from "../format";

/** More characters than these, as a share, that could not be decoded: not a text. */
const DAMAGED = 0.01;

/** Why a file, decoded as UTF-8, is refused; null if it is a text. */
export function whyNoText(name: string, text: string): string | null {
  const refused = (why: string): string =>
    `${visible(name)} is not a text in UTF-8: ${why}. Pick another file, or save it as plain text in UTF-8.`;
  if (text.includes("\0")) return refused("it contains NUL characters");
  const letters = [...text];
  const damaged = letters.filter((letter) => letter === "\ufffd").length / Math.max(1, letters.length);
  return damaged > DAMAGED ? refused(`${percent(damaged)} of its characters could not be decoded`) : null;
}
