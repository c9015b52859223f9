// What a run does with its depth, in sentences that are computed from its trace and its ablation.
import { change, number, percent, visible } from "./format";
import { judge, type Judgement } from "./importance";
import { outputName, readerName } from "./names";
import { unpack } from "./packed";
import { routesOf } from "./routes";
import { mean } from "./statistics";
import type { Run } from "./types";

/** True where every reader takes every output with weight 1, whatever the mechanism could do. */
export function isPlain(run: Run): boolean {
  const packed = run.trace?.tensors.M_mean;
  if (!packed || run.trace?.kind === "operator") return false;
  const { data, shape } = unpack(packed);
  const n = shape.at(-1) ?? 0;
  return data.every((value, at) => at % n > Math.floor(at / n) % n || Math.abs(value - 1) < 1e-4);
}

function reads(run: Run): string {
  const rows = run.trace?.rows;
  const embedding = mean(rows?.embedding_share, 1);
  const newest = mean(rows?.locality, 1);
  if (embedding === null || newest === null) return "";
  const spread = mean(rows?.spread, 1);
  const tokens =
    spread === null
      ? ""
      : spread < 1e-4
        ? " All tokens read alike."
        : ` Tokens differ by ${number(spread, 2)} in their shares.`;
  return `A read takes ${percent(embedding)} from the embedding and ${percent(newest)} from the newest source.${tokens}`;
}

function values(run: Run): string {
  const packed = run.trace?.tensors.values_mean;
  if (!run.kv_mechanism || !packed) return "";
  const { data, shape } = unpack(packed);
  const n = shape.at(-1) ?? 0;
  const own = mean([...data].filter((_, at) => at % n === Math.floor(at / n) % n));
  return ` An attention layer takes ${percent(own)} of its values from itself, the rest from layers below.`;
}

function strongest(run: Run): string {
  const route = routesOf(run, "share", true).find(({ source, row }) => row - source > 1);
  if (!route) return "";
  const cut = route.effect ? `; without it the loss changes by ${change(route.effect.loss.mean)}` : "";
  return ` Its strongest route over more than one sublayer is ${outputName(run.kinds, route.source)} → ${readerName(run.kinds, route.row)} (${percent(route.share)} of that read${cut}).`;
}

const WORDS: [Judgement, string][] = [
  ["matters", "much weight, and it matters"],
  ["large weight but no effect", "much weight but no effect"],
  ["small weight but matters", "little weight, but it matters"],
  ["no more than random cuts", "no more effect than random cuts"],
  ["not told apart from random cuts", "not told apart from random cuts"],
];

function importance(run: Run): string {
  const families = (run.ablation?.effects ?? []).filter((effect) => effect.kind === "family");
  const said = WORDS.flatMap(([judgement, words]) => {
    const names = families.filter((effect) => judge(effect) === judgement).map((effect) => visible(effect.name));
    return names.length ? [`${names.join(", ")}: ${words}`] : [];
  });
  return said.length ? ` Cuts: ${said.join("; ")}.` : "";
}

/** A few sentences, or "" where nothing was traced. */
export function summary(run: Run): string {
  if (!run.trace) return "";
  if (isPlain(run))
    return `A plain residual: every reader takes the sum of everything below it, with weight 1.${values(run)}${importance(run)}`;
  return `${reads(run)}${values(run)}${strongest(run)}${importance(run)}`;
}
