// Mass against importance: what has weight, and what the loss says when it is cut.
import { chart } from "../chart";
import { bar, choices, select, toggle } from "../controls";
import { el, replace, userText } from "../dom";
import { figure, type NamedRun } from "../figure";
import { change, ended, interval, loss, percent } from "../format";
import { RULE, controlsText, judge, judgementSentence } from "../importance";
import { absent, mostTelling, named, type Section } from "../section";
import { KINDS, scatter } from "../scatter";
import { table } from "../table";
import type { Ablation, Effect, Run } from "../types";

type Shown = "all" | Effect["kind"];

function families(ablation: Ablation): HTMLElement | null {
  const list = ablation.effects.filter((effect) => effect.kind === "family");
  if (!list.length) return null;
  return table({
    caption: "Families of sources, cut as a whole. Change of loss and KL with their intervals.",
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

function statements(ablation: Ablation): HTMLElement | null {
  const list = ablation.effects.filter((effect) => effect.kind === "family");
  if (!list.length) return null;
  return el(
    "ul",
    { class: "sentences" },
    ...list.map((effect) =>
      el(
        "li",
        {},
        el("strong", {}, userText(effect.name)),
        " ",
        `(${percent(effect.mass)} of the reads). `,
        judgementSentence(effect),
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
  const redraw = (): void => {
    const { tokens, rows, loss: plain, how, confidence } = ablation();
    replace(
      about,
      userText(ended(how)),
      ` Loss without any cut: ${loss(plain)} nats, ${tokens.toLocaleString("en-US")} tokens in ${rows} sequences; bars are ${percent(confidence)} intervals over sequences.`,
    );
    replace(below, statements(ablation()), families(ablation()));
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
    choices(
      "Cuts",
      [
        { value: "all", label: "all" },
        { value: "family", label: "families" },
        { value: "source", label: "sources" },
        { value: "route", label: "routes" },
      ],
      "all",
      (value) => {
        state.shown = value as Shown;
        picture.redraw();
      },
    ),
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
        controls,
        legend: () => [
          ...KINDS.map(({ label, colour }) => ({ name: label, colour })),
          { name: "× random cuts", colour: "var(--ink-soft)", dash: "2 3" },
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
