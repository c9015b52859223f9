// The strongest routes from sources to readers, and what cutting them did.
import { part, unpack } from "./packed";
import type { Effect, Run } from "./types";

export interface Route {
  row: number;
  source: number;
  share: number;
  contribution: number;
  effect: Effect | null;
}

export type RouteOrder = "share" | "contribution";

/** All routes, strongest first. Column r of row r is the newest source, which every reader leans on. */
export function rankRoutes(
  n: number,
  share: Float32Array | null,
  contribution: Float32Array | null,
  order: RouteOrder,
  skipNewest: boolean,
): Route[] {
  const routes: Route[] = [];
  for (let row = 1; row < n; row++) {
    for (let source = 0; source <= row - (skipNewest ? 1 : 0); source++) {
      const at = row * n + source;
      routes.push({ row, source, share: share?.[at] ?? NaN, contribution: contribution?.[at] ?? NaN, effect: null });
    }
  }
  const size = (route: Route): number => Math.abs(route[order]);
  return routes
    .filter((route) => Number.isFinite(route[order]) && size(route) > 0)
    .sort((a, b) => size(b) - size(a) || a.row - b.row || a.source - b.source);
}

export function routesOf(run: Run, order: RouteOrder, skipNewest: boolean): Route[] {
  const tensors = run.trace?.tensors;
  const read = (name: "share" | "contribution"): Float32Array | null => {
    const packed = tensors?.[name];
    return packed ? unpack(packed).data : null;
  };
  const effects = new Map(
    (run.ablation?.effects ?? [])
      .filter((effect) => effect.kind === "route")
      .map((effect) => [`${effect.row},${effect.source}`, effect]),
  );
  return rankRoutes(run.depth + 1, read("share"), read("contribution"), order, skipNewest).map((route) => ({
    ...route,
    effect: effects.get(`${route.row},${route.source}`) ?? null,
  }));
}

/** Mean of one column's share over its later readers, for sentences. */
export function meanRow(run: Run, row: number): Float32Array | null {
  const packed = run.trace?.tensors.M_mean;
  if (!packed) return null;
  return part(unpack(packed), 0, row).data;
}
