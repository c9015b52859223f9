// The frame of a section, and the sentence that says what is missing.
import { el, userText, type Child } from "./dom";
import type { NamedRun } from "./figure";
import type { PageDocument, Run } from "./types";

export interface Section {
  id: string;
  /** In the navigation. */
  label: string;
  title: string;
  intro: string;
  /** The body; null leaves the section out. */
  draw: (page: PageDocument) => Child[] | null;
}

export function named(page: PageDocument): NamedRun[] {
  return page.runs.map((run, index) => ({ run, index }));
}

/** The run to show first: one that learned a mixture, if there is one. */
export function mostTelling(runs: NamedRun[]): NamedRun {
  return (
    runs.find(({ run }) => run.trace?.source_names.length) ??
    runs.find(({ run }) => run.mechanism !== "residual") ??
    runs[0]!
  );
}

/** The run's own sentence about what is missing, if one fits; otherwise the one given. */
export function reason(run: Run, topic: RegExp, otherwise: string): string {
  return run.missing.find((sentence) => topic.test(sentence)) ?? otherwise;
}

/** One line for each run that cannot be shown here. */
export function absent(
  runs: NamedRun[],
  has: (run: Run) => boolean,
  topic: RegExp,
  otherwise: string,
): HTMLElement | null {
  return notShown(runs.filter(({ run }) => !has(run)).map(({ run }) => ({ run, text: reason(run, topic, otherwise) })));
}

/** Runs with the reason why they are not shown, one line for each reason. */
export function notShown(lines: { run: Run; text: string }[]): HTMLElement | null {
  if (!lines.length) return null;
  const texts = new Map<string, Run[]>();
  for (const { run, text } of lines) texts.set(text, [...(texts.get(text) ?? []), run]);
  return el(
    "div",
    { class: "absent", role: "note" },
    ...[...texts].map(([text, list]) => {
      const names = list.flatMap((run, index) => [index ? ", " : "", userText(run.name)]);
      return el("p", {}, el("strong", {}, "Not shown for ", ...names), ": ", userText(text));
    }),
  );
}

export function paragraph(...children: Child[]): HTMLElement {
  return el("p", {}, ...children);
}

export function sectionNode(section: Section, body: Child[]): HTMLElement {
  return el(
    "section",
    { id: section.id, "aria-labelledby": `${section.id}-title` },
    el("h2", { id: `${section.id}-title` }, section.title),
    section.intro ? el("p", { class: "intro" }, section.intro) : null,
    ...body,
  );
}
