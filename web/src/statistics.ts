// Means over values of which some are missing.
import type { Maybe } from "./types";

/** The mean of the known values from a position on; null if there are none. */
export function mean(values: Maybe[] | undefined, from = 0): number | null {
  const known = (values ?? []).slice(from).filter((value): value is number => value !== null && Number.isFinite(value));
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}
