// What was compared, how it ended, and the key facts of each run.
import { el, nameText, sentences, userText, type Child } from "../dom";
import { swatch, type NamedRun } from "../figure";
import { loss, number, percent } from "../format";
import { mechanismName } from "../names";
import { named, paragraph, type Section } from "../section";
import { summary } from "../summary";
import { mean } from "../statistics";
import { table, type Cell } from "../table";
import type { Health, PageDocument, Run } from "../types";

export function finalLoss(run: Run): number | null {
  return run.curves?.validation.loss.filter((value) => value !== null).at(-1) ?? null;
}

const ICONS: Record<Health["level"], string> = { good: "✓", notice: "!", problem: "✕", unknown: "?" };

function worst(run: Run): Cell {
  const order: Health["level"][] = ["problem", "notice", "unknown", "good"];
  const level = order.find((each) => run.health.some((check) => check.level === each));
  if (!level) return null;
  const count = run.health.filter((check) => check.level === level).length;
  return el(
    "span",
    { class: `level ${level}` },
    el("span", { "aria-hidden": "true" }, `${ICONS[level]} `),
    `${count} ${level}`,
  );
}

function rankText(run: Run): string {
  const rank = run.trace?.rank;
  if (!rank) return "–";
  return rank.declared === null ? number(rank.mean) : `${number(rank.mean)} (declared ${rank.declared})`;
}

export function runCell({ run, index }: NamedRun): HTMLElement {
  return el("span", { class: "run-name" }, swatch(index), nameText(run.name));
}

function glance(runs: NamedRun[]): HTMLElement | null {
  const rows = runs.map((each): Cell[] => {
    const { run } = each;
    const rows = run.trace?.rows;
    return [
      runCell(each),
      loss(finalLoss(run) ?? run.trace?.loss),
      percent(mean(rows?.embedding_share, 1)),
      percent(mean(rows?.locality, 1)),
      number(mean(rows?.entropy, 1)),
      number(mean(rows?.spread, 1)),
      rankText(run),
      number(run.trace?.effective_rank?.mean),
      worst(run),
    ];
  });
  const known = rows[0]!.map(
    (_, column) => column === 0 || rows.some((row) => row[column] !== null && row[column] !== "–"),
  );
  if (known.filter(Boolean).length < 2) return null;
  const keep = <T>(cells: T[]): T[] => cells.filter((_, column) => known[column]);
  return table({
    caption: "Depth at a glance. Shares and entropy (nats) are means over all readers but the first.",
    headings: keep([
      "run",
      "final loss",
      "share of the embedding",
      "share of the newest source",
      "entropy of a read",
      "spread over tokens",
      "semiseparable rank",
      "effective rank",
      "health",
    ]),
    rows: rows.map(keep),
    numeric: keep([0, 1, 2, 3, 4, 5, 6, 7, -1]).flatMap((column, place) => (column > 0 ? [place] : [])),
  });
}

/** Facts downwards, runs to the right: there are more facts than runs. */
function facts(runs: NamedRun[]): HTMLElement | null {
  const labels = [...new Set(runs.flatMap(({ run }) => run.facts.map(([label]) => label)))];
  const rows: Cell[][] = [
    ["mechanism", ...runs.map(({ run }) => mechanismName(run))],
    ["sublayers × width", ...runs.map(({ run }) => `${run.depth} × ${run.dim}`)],
    ["state", ...runs.map(({ run }) => (run.finished ? "finished" : "unfinished"))],
    ...labels.map((label): Cell[] => [
      label,
      ...runs.map(({ run }) => run.facts.find(([name]) => name === label)?.[1] ?? "–"),
    ]),
  ];
  return table({ caption: "The runs.", headings: ["fact", ...runs.map(runCell)], rows, numeric: [] });
}

function summaries(runs: NamedRun[]): HTMLElement | null {
  const items = runs.flatMap((each) => {
    const text = summary(each.run);
    return text ? [el("li", {}, el("strong", {}, userText(each.run.name)), `: ${text}`)] : [];
  });
  return items.length
    ? el("div", {}, el("h3", {}, "What each run does with its depth"), el("ul", { class: "sentences" }, ...items))
    : null;
}

function lead(page: PageDocument): Child {
  if (page.study?.verdicts.length) return sentences(page.study.verdicts, "verdicts");
  const lines = page.runs.map((run) => {
    const final = finalLoss(run);
    const end =
      final === null ? "has no validation loss" : `ends at a validation loss of ${loss(final)} nats per token`;
    return `${run.name} (${mechanismName(run)}, ${run.depth} sublayers of width ${run.dim}) ${end}.`;
  });
  return sentences(lines, "verdicts");
}

export const verdict: Section = {
  id: "verdict",
  label: "Verdict",
  title: "Verdict",
  intro: "",
  draw: (page) => {
    const runs = named(page);
    const losses = page.study?.losses;
    return [
      runs.length ? lead(page) : paragraph("This document contains no runs, so there is nothing to show."),
      losses ? table({ caption: "Losses of the study.", headings: losses.headings, rows: losses.cells }) : null,
      losses?.note ? paragraph(userText(losses.note)) : null,
      runs.length ? glance(runs) : null,
      summaries(runs),
      runs.length ? facts(runs) : null,
    ];
  },
};
