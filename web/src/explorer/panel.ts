// The live panel of the explorer: a text, one run or two, and the run button.
import { bar, button, select, toggle } from "../controls";
import { el, replace, type Child } from "../dom";
import { number, plural, visible } from "../format";
import { named, type Section } from "../section";
import type { PageDocument, Run } from "../types";
import { client, type Client } from "./client";
import { column, type Column } from "./column";
import { whyNoText } from "./text";

const LIMIT = 100_000;
const TYPING = 600;
const EDITING = 180;
const START = "def read(self, state):\n    return self.combine(state, self.coeff(state))\n";

interface Place {
  run: Run;
  /** The text of the results shown; null before the first. */
  answered: string | null;
  column: Column;
  client: Client;
}

interface State {
  text: string;
  /** Position chosen by the reader; null is the last token. */
  token: number | null;
  renormalise: boolean;
  places: Place[];
}

function fileInput(load: (text: string) => void, complain: (message: string) => void): HTMLElement {
  const input = el("input", {
    type: "file",
    id: "explorer-file",
    accept: "text/*,.py,.md,.json,.txt,.toml",
    "data-test": "explorer-file",
  });
  input.addEventListener("change", async () => {
    const file = input.files?.[0];
    if (!file) return;
    if (file.size > LIMIT)
      complain(
        `${visible(file.name)} has ${number(file.size / 1000)} kB; the explorer takes files of at most ${LIMIT / 1000} kB. Copy a part of it into the text field.`,
      );
    else {
      const text = await file.text();
      const why = whyNoText(file.name, text);
      if (why) complain(why);
      else load(text);
    }
    input.value = "";
  });
  return el("div", { class: "control" }, el("label", { for: "explorer-file" }, "or pick a file"), input);
}

function draw(page: PageDocument): Child[] {
  const runs = named(page);
  const state: State = { text: START, token: null, renormalise: false, places: [] };
  const alertBox = el("div", { role: "alert" });
  const status = el("p", { class: "status", role: "status", "data-test": "explorer-status" });
  const columns = el("div", { class: "compare" });
  let timer = 0;
  const complain = (message: string | null): void =>
    replace(alertBox, message ? el("p", { class: "error", "data-test": "explorer-error" }, visible(message)) : null);

  /** Marks the results of each run that are not those of the text. */
  const markStale = (why: string | null, busy = false): void =>
    state.places.forEach((each) => {
      const old = each.answered !== null && each.answered !== state.text;
      each.column.stale(why ?? (old ? "Results of the previous text." : null), busy);
    });
  const ask = async (place: Place): Promise<void> => {
    const { text } = state;
    const answer = await place.client.run({
      ...place.column.request(),
      text,
      renormalise: state.renormalise,
      token: state.token,
    });
    if (!answer || !state.places.includes(place)) return;
    place.column.show(answer, state.token ?? answer.table.tokens.length - 1);
    place.answered = text;
    place.column.stale(text === state.text ? null : "Results of the previous text.", false);
    const length = answer.table.tokens.length;
    status.textContent =
      length === 0 ? "The text has no tokens." : `${plural(length, "token")} in ${number(answer.seconds, 2)} s.`;
  };
  const send = async (): Promise<void> => {
    window.clearTimeout(timer);
    complain(null);
    if (!state.text) {
      status.textContent = "Type a text, or pick a file.";
      markStale(null);
      return;
    }
    status.textContent = "Running …";
    markStale(null, true);
    try {
      await Promise.all(state.places.map(ask));
    } catch (error) {
      status.textContent = "";
      complain((error as Error).message);
      markStale("Results from before the last change, which got no answer.");
    }
  };
  const soon = (wait: number): void => {
    window.clearTimeout(timer);
    timer = window.setTimeout(() => void send(), wait);
  };
  const place = (index: number): Place => {
    const each = runs[index]!;
    return {
      run: each.run,
      answered: null,
      client: client(),
      column: column(each, {
        changed: (from) => {
          share(from);
          soon(EDITING);
        },
        chooseToken: (token) => {
          if (token === state.token) return;
          state.token = token;
          state.places.forEach((other) => other.column.chooseToken(token));
          soon(EDITING);
        },
      }),
    };
  };
  /** With two runs of equal depth the edits of one are those of both. */
  const share = (from: Column | undefined): void => {
    const [first, second] = state.places;
    if (!first || !second) {
      first?.column.editable("", false);
      return;
    }
    const depths = [first.run.depth, second.run.depth];
    if (depths[0] !== depths[1]) {
      const note = `Edits apply to the first run only: the runs have ${depths.join(" and ")} sublayers.`;
      first.column.editable(note, false);
      second.column.editable(note, true);
      second.column.adopt([], []);
      return;
    }
    const layers = state.places.map(({ run }) => run.kinds.filter((kind) => kind === "attn").length);
    const both = layers[0] === layers[1] && state.places.every(({ run }) => run.kv_mechanism);
    const either = state.places.some(({ run }) => run.kv_mechanism);
    const note = `Edits apply to both runs${either && !both ? "; those of the mixing of values only to the run that has it" : ""}.`;
    state.places.forEach((each) => {
      each.column.editable(note, false);
      if (!from || each.column === from) return;
      const { edits, value_edits: values } = from.request();
      each.column.adopt(edits, both ? values : null);
    });
  };
  const setRun = (at: number, value: string): void => {
    const others = state.places.filter((_, index) => index !== at);
    state.places =
      value === ""
        ? others
        : at === 0
          ? [place(Number(value)), ...others]
          : [...state.places.slice(0, 1), place(Number(value))];
    replace(columns, ...state.places.map((each) => each.column.node));
    share((others.find((each) => state.places.includes(each)) ?? state.places[0])?.column);
    void send();
  };
  const box = el("textarea", {
    id: "explorer-text",
    rows: 5,
    spellcheck: "false",
    dir: "auto",
    "data-test": "explorer-text",
  });
  box.value = state.text;
  const refuse = (message: string): void => {
    complain(message);
    status.textContent = "";
    markStale("The file was not taken: these are results of the previous text. Run shows those of the text above.");
  };
  const setText = (text: string): void => {
    state.text = text;
    state.token = null;
    if (box.value !== text) box.value = text;
    markStale(null);
  };
  box.addEventListener("input", () => {
    setText(box.value);
    soon(TYPING);
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) void send();
  });
  const options = runs.map(({ run, index }) => ({ value: String(index), label: run.name }));
  const form = el(
    "form",
    { "aria-label": "Text and run" },
    el("div", {}, el("label", { for: "explorer-text" }, "Text"), box),
    bar(
      select("Run", options, "0", (value) => setRun(0, value), "explorer-run-select").node,
      runs.length > 1
        ? select(
            "Compare with",
            [{ value: "", label: "nothing" }, ...options],
            "",
            (value) => setRun(1, value),
            "explorer-compare",
          ).node
        : null,
      toggle(
        "renormalise rows after a cut",
        false,
        (on) => {
          state.renormalise = on;
          soon(EDITING);
        },
        "renormalise",
      ),
      fileInput((text) => {
        setText(text);
        void send();
      }, refuse),
    ),
    bar(
      button("Run", () => void send(), "primary", "explorer-run"),
      el("span", { class: "hint" }, "Runs by itself shortly after each change. Ctrl+Enter runs at once."),
    ),
    status,
    alertBox,
  );
  form.addEventListener("submit", (event) => event.preventDefault());
  setRun(0, "0");
  return [el("div", { class: "card" }, form), columns];
}

export const explorer: Section = {
  id: "explorer",
  label: "Explorer",
  title: "Explorer",
  intro: "Type a text, choose a token, cut a route and see what changes.",
  draw: (page) =>
    page.runs.length
      ? draw(page)
      : [el("p", { class: "absent" }, "No run was opened. Start depthmix explore with the folder of a run.")],
};
