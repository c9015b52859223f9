// Mass against importance: what has weight, and what the loss says when it is cut.
import { chart } from "../chart";
import { bar, choices, select, toggle } from "../controls";
import { el, nameText, replace, userText } from "../dom";
import { figure, subject, type NamedRun } from "../figure";
import { change, ended, interval, loss, percent, plural, visible } from "../format";
import { RULE, controlsText, judge, judgementSentence } from "../importance";
import { absent, mostTelling, named, type Section } from "../section";
import { KINDS, scatter } from "../scatter";
import { table } from "../table";
import type { Ablation, Effect, Run } from "../types";

type Shown = "all" | Effect["kind"];

const CUTS: { value: Shown; label: string; says: string }[] = [
  { value: "all", label: "all", says: "all cuts" },
  { value: "family", label: "families", says: "families of sources" },
  { value: "source", label: "sources", says: "single sources" },
  { value: "route", label: "routes", says: "single routes" },
];

function families(run: Run, ablation: Ablation): HTMLElement | null {
  const list = ablation.effects.filter((effect) => effect.kind === "family");
  if (!list.length) return null;
  return table({
    caption: `${visible(run.name)}: families of sources, cut as a whole. Change of loss and KL with their intervals.`,
    headings: ["family", "edges", "mass", "change of loss", "KL", "random controls (change of loss)", "verdict"],
    rows: list.map((effect) => [
      userText(effect.name),
      String(effect.edges),
      percent(effect.mass),
      interval(effect.loss),
      interval(effect.kl),
      controlsText(effect.controls, change),
      el("strong", {}, judge(effect)),
    ]),
    numeric: [1, 2],
  });
}

function statements(run: Run, ablation: Ablation): HTMLElement | null {
  const list = ablation.effects.filter((effect) => effect.kind === "family");
  if (!list.length) return null;
  return el(
    "div",
    {},
    el("h3", {}, "Families of sources in ", nameText(run.name)),
    el(
      "ul",
      { class: "sentences" },
      ...list.map((effect) =>
        el(
          "li",
          {},
          el("strong", {}, userText(effect.name)),
          " ",
          `(${percent(effect.mass)} of |M| in the rows that were cut). `,
          judgementSentence(effect),
        ),
      ),
    ),
  );
}

function key(): HTMLElement {
  const symbols: Record<string, string> = { circle: "●", square: "■", triangle: "▲", diamond2: "◆" };
  return el(
    "div",
    { class: "key-row" },
    ...KINDS.map(({ label, colour, symbol }) =>
      el("span", {}, el("span", { style: `color:${colour}`, "aria-hidden": "true" }, `${symbols[symbol]} `), label),
    ),
    el("span", {}, el("span", { "aria-hidden": "true" }, "× "), "random cuts of as many edges"),
  );
}

function draw(runs: NamedRun[]): HTMLElement[] {
  const first = mostTelling(runs);
  const state = { run: first.run, shown: "all" as Shown, stretch: true };
  const ablation = (): Ablation => state.run.ablation!;
  const current = (): Effect[] =>
    ablation().effects.filter((effect) => state.shown === "all" || effect.kind === state.shown);
  const picture = chart(
    (width) => scatter(width, current(), state.stretch),
    () =>
      `Scatter of mass against change of loss: ${current()
        .filter((effect) => effect.kind === "family")
        .map((effect) => `${effect.name} ${percent(effect.mass)}, ${interval(effect.loss)}`)
        .join("; ")}.`,
  );
  const about = el("p", { class: "hint" });
  const below = el("div", {});
  const title = subject();
  const describe = (): void => title.set(state.run.name, CUTS.find(({ value }) => value === state.shown)?.says ?? "");
  const redraw = (): void => {
    describe();
    const { tokens, rows, loss: plain, how, confidence } = ablation();
    replace(
      about,
      userText(ended(how)),
      ` Loss without any cut: ${loss(plain)} nats, ${plural(tokens, "token")} in ${plural(rows, "sequence")}; bars are ${percent(confidence)} intervals over sequences.`,
    );
    replace(below, statements(state.run, ablation()), families(state.run, ablation()));
    picture.redraw();
  };
  const controls = bar(
    runs.length > 1
      ? select(
          "Run",
          runs.map(({ run, index }) => ({ value: String(index), label: run.name })),
          String(first.index),
          (value) => {
            state.run = runs.find(({ index }) => String(index) === value)!.run;
            redraw();
          },
          "importance-run",
        ).node
      : null,
    choices("Cuts", CUTS, "all", (value) => {
      state.shown = value as Shown;
      describe();
      picture.redraw();
    }),
    toggle("stretch small effects", true, (on) => {
      state.stretch = on;
      picture.redraw();
    }),
  );
  redraw();
  return [
    figure(
      {
        title: "Weight against effect",
        name: "importance",
        subject: title,
        controls,
        legend: () => [
          ...KINDS.map(({ label, colour, symbol }) => ({ name: label, colour, symbol })),
          { name: "random cuts of as many edges", colour: "var(--ink-soft)", symbol: "times" as const },
        ],
        says: "To the right is what readers weigh most, upwards is what the model needs. Points in the lower right have weight without importance.",
        hint: RULE,
      },
      key(),
      picture.node,
      about,
    ),
    below,
  ];
}

const has = (run: Run): boolean => !!run.ablation?.effects.length;

export const importanceSection: Section = {
  id: "importance",
  label: "Importance",
  title: "Weight is not importance",
  intro: "What changes if a source is no longer read?",
  draw: (page) => {
    const all = named(page);
    const runs = all.filter(({ run }) => has(run));
    const note = absent(all, has, /ablat|cut/i, "no ablation was made.");
    return runs.length ? [...draw(runs), note] : [note];
  },
};
