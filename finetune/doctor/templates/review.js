"use strict";
// A key names what is decided: an image, such as "train/17", or the classes of a problem as JSON.
// A decision is {action, label, given}; `given` is the label in the data, or the class that goes.
const data = JSON.parse(document.getElementById("data").textContent);
const decisions = new Map(Object.entries(data.decisions));
const PAGE = 100; // findings in a request
const ROW_PIXELS = 64;
const REASONS = {
  far_from_others: "Unlike the other images", blank: "Blank", tiny: "Tiny", over_exposed: "Overexposed",
  under_exposed: "Underexposed", odd_shape: "Odd shape", unreadable: "Cannot be read",
};
const DONE = { keep: "kept", drop: "dropped", relabel: "relabeled", merge: "merged" };
let kind = data.kinds[0];
let current = 0; // index of the finding
let selected = 0; // index of the image in it
const undoSteps = [];
const $ = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}
const bdi = (text) => element("bdi", {}, text);
const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
const splitOf = (key) => key.split("/")[0];

// --- findings and pictures -------------------------------------------------------------------

const pages = new Map(); // findings by "kind/page", or the promise of them
function finding(index, of = kind) {
  if (data.findings) return data.findings[of.name][index];
  const page = Math.floor(index / PAGE);
  const key = `${of.name}/${page}`;
  const known = pages.get(key);
  if (Array.isArray(known)) return known[index % PAGE];
  if (!known && index >= 0 && index < of.keys.length) {
    pages.set(key, fetch(`api/findings/${of.name}?start=${page * PAGE}&count=${PAGE}`)
      .then((response) => response.ok ? response.json() : Promise.reject(new Error(response.statusText)))
      .then((found) => { pages.set(key, found); showProblem(""); render(); })
      .catch(() => { setTimeout(() => { pages.delete(key); render(); }, 2000); showProblem(NO_ANSWER); }));
  }
  return undefined;
}

function picture(key, size, alt) {
  const frame = element("span", { class: "frame" });
  const source = data.pictures ? data.pictures[key] : `picture/${size}/${key}`;
  if (!source) frame.append("no picture");
  else {
    const image = element("img", { src: source, alt, decoding: "async", loading: size === "medium" ? "lazy" : null });
    image.addEventListener("load", () => { if (Math.max(image.naturalWidth, image.naturalHeight) < 96) image.classList.add("small"); });
    image.addEventListener("error", () => image.replaceWith("cannot be read"));
    frame.append(image);
  }
  return frame;
}

// --- decisions -------------------------------------------------------------------------------

const isDecided = (of, index) => of.keys[index].every((key) => decisions.has(key));
const countDecided = (of) => of.keys.reduce((sum, _, index) => sum + isDecided(of, index), 0);
const nextUndecided = (of, after) => {
  for (let step = 1; step <= of.keys.length; step++) {
    const index = (after + step) % of.keys.length;
    if (!isDecided(of, index)) return index;
  }
  return -1;
};

function decide(changes) {
  if (!changes.length) return undefined;
  const givenOf = (key) => finding(current).images.find((image) => image.key === key)?.given;
  changes = changes.map(([key, change]) => [key, change && { given: givenOf(key), ...change }]);
  const merges = new Map([...decisions].filter(([, each]) => each.action === "merge").map(([key, each]) => [each.given, [key, each.label]]));
  for (const [key, change] of changes) {
    const other = change?.action === "merge" && merges.get(change.given);
    let into = change?.label;
    while (merges.has(into) && merges.get(into)[0] !== key) into = merges.get(into)[1];
    if (change?.action === "merge" && into === change.given) return announce(`“${change.label}” is already merged into “${change.given}”; undo that first.`, true);
    if (other && other[0] !== key) return announce(`“${change.given}” is already merged into “${other[1]}”; undo that first.`, true);
  }
  undoSteps.push({ kind, current, before: changes.map(([key]) => [key, decisions.get(key) ?? null]) });
  const warning = warnOfSmallClasses();
  apply(changes);
  const words = changes.map(([, change]) => describe(change));
  announce([...new Set(words)].join(", "));
  if (warnOfSmallClasses() !== warning) announce(warnOfSmallClasses(), true);
  if (changes.every(([, change]) => !change)) render();
  else advance();
}

function apply(changes) {
  for (const [key, change] of changes) {
    if (change) decisions.set(key, change);
    else decisions.delete(key);
    unsaved.set(key, change);
  }
  save();
}

// What is left of the training images: "" unless a class has lost all, or all but one.
function warnOfSmallClasses() {
  const before = new Map(data.classes.map((name, index) => [name, data.train_sizes[index]]));
  const after = new Map(before), into = new Map();
  const add = (label, by) => { for (const name of data.multilabel ? label.split("|") : [label]) if (after.has(name)) after.set(name, after.get(name) + by); };
  for (const [key, { action, label, given }] of decisions) {
    if (action === "merge") into.set(given, label);
    else if (action !== "keep" && splitOf(key) === "train") {
      add(given ?? data.images[key].given, -1);
      if (action === "relabel") add(label, 1);
    }
  }
  for (const [from, next] of into) {
    let to = next;
    for (let step = 0; into.has(to) && step < into.size; step++) to = into.get(to); // a file may have a circle
    for (const sizes of [before, after]) { sizes.set(to, sizes.get(to) + sizes.get(from)); sizes.delete(from); }
  }
  const having = (few) => [...after].filter(([name, size]) => size === few && before.get(name) > few).map(([name]) => `“${name}”`).join(", ");
  return [
    having(0) && `No training image of ${having(0)} is left, so training will refuse these decisions; keep one, or merge the class.`,
    having(1) && `A single training image of ${having(1)} is left.`,
  ].filter(Boolean).join(" ");
}

function advance() {
  const keys = kind.keys[current];
  const open = keys.findIndex((key) => !decisions.has(key));
  if (open >= 0 && keys.length > 1) { selected = open; return render(); }
  goToUndecided();
}

function goToUndecided() {
  for (const each of [kind, ...data.kinds]) {
    const index = nextUndecided(each, each === kind ? current : -1);
    if (index >= 0) { kind = each; return goTo(index); }
  }
  render();
  if (data.kinds.some((each) => each.keys.length)) finish();
}

function undo() {
  const step = undoSteps.pop();
  if (!step) return announce("Nothing to undo.");
  apply(step.before);
  kind = step.kind;
  goTo(step.current);
  announce("Undone.");
}

const describe = (decision) => !decision ? "no decision" : {
  keep: "kept", drop: "dropped", relabel: `→ ${decision.label}`, merge: `${decision.given} → ${decision.label}`,
}[decision.action];

// --- saving ----------------------------------------------------------------------------------

const NO_ANSWER = "The server does not answer. Start it again with the same command; this page then goes on, and saves what you have decided.";
const unsaved = new Map();
let isSaving = false;
const storageKey = `finetune-review-${data.id}`;
if (data.pictures) {
  try {
    for (const [key, value] of JSON.parse(localStorage.getItem(storageKey) ?? "[]")) decisions.set(key, value);
  } catch { /* no storage: the decisions last as long as the page */ }
}

async function save() {
  document.body.toggleAttribute("data-unsaved", isSaving || unsaved.size > 0);
  if (isSaving || !unsaved.size) return;
  if (data.pictures) {
    unsaved.clear();
    document.body.removeAttribute("data-unsaved");
    try { localStorage.setItem(storageKey, JSON.stringify([...decisions])); } catch { /* as above */ }
    return;
  }
  isSaving = true;
  const batch = new Map([...unsaved].slice(0, 5000));
  for (const key of batch.keys()) unsaved.delete(key);
  let delay = 0;
  try {
    const response = await fetch("api/decisions", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(Object.fromEntries(batch)),
    });
    if (!response.ok) throw new Error(`Not saved: ${await response.text()}`);
    showProblem("");
  } catch (error) {
    for (const [key, change] of batch) if (!unsaved.has(key)) unsaved.set(key, change);
    showProblem(error.message.startsWith("Not saved") ? error.message : NO_ANSWER);
    delay = 2000;
  }
  isSaving = false;
  setTimeout(save, delay);
}
addEventListener("beforeunload", (event) => { if (unsaved.size) event.preventDefault(); });

function showProblem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function announce(text, isProblem = false) {
  $("announcement").textContent = text;
  if (isProblem) { showProblem(text); setTimeout(() => { if ($("problem").textContent === text) showProblem(""); }, 6000); }
}

function toCsv() {
  const cell = (value) => {
    const text = /^[=+\-@\t\r\n']/.test(value ?? "") ? `'${value}` : String(value ?? "");
    return `"${text.replaceAll('"', '""')}"`;
  };
  const rows = [["action", "split", "index", "path", "given", "label", "digest"]];
  for (const [key, { action, label, given }] of decisions) {
    const image = data.images[key];
    rows.push(image ? [action, image.split, image.index, image.path, image.given, label, image.digest] : [action, "", "", "", given, label, ""]);
  }
  return rows.map((row) => `${row.map(cell).join(",")}\n`).join("");
}

// --- what can be decided about a finding -----------------------------------------------------

// Actions: [keys of the keyboard, words, changes or function, is suggested].
function actions(found) {
  const keys = kind.keys[current];
  const all = (decision) => keys.map((key) => [key, decision]);
  const one = (decision) => [[keys[selected], decision]];
  const keep = { action: "keep" }, drop = { action: "drop" };
  const relabel = ["r", ["Other label…"], () => chooseLabel(found)];
  if (found.classes) {
    const [first, second] = found.classes;
    const merge = (given, label) => all({ action: "merge", given, label });
    const apart = all({ action: "keep", given: first, label: second ?? first });
    if (!second) return [["1", ["Keep"], apart], ["m", ["Merge into…"], () => chooseLabel(found)]];
    const [small, large] = found.sizes[0] <= found.sizes[1] ? [first, second] : [second, first];
    return [
      ["1", ["Keep both"], apart],
      [found.reason === "same" ? "2 Enter m" : "m", ["Merge ", bdi(small), " into ", bdi(large)], merge(small, large), found.reason === "same"],
      ["M", ["Merge ", bdi(large), " into ", bdi(small)], merge(large, small)],
    ];
  }
  if (keys.length > 1) {
    const held = ["test", "val", "train"].find((split) => keys.some((key) => splitOf(key) === split));
    const spans = keys.some((key) => splitOf(key) !== held);
    const stays = spans ? keys.map((key) => splitOf(key) === held) : keys.map((_, index) => index === 0);
    const others = [...new Set(keys.map(splitOf))].filter((split) => split !== held).join(" and ");
    return [
      ["1", ["Keep all"], all(keep)],
      ["2 Enter", [spans ? `Drop from ${others}` : "Keep only the first"], keys.map((key, index) => [key, stays[index] ? keep : drop]), true],
      ["m", ["Keep only the selected"], keys.map((key, index) => [key, index === selected ? keep : drop])],
      ["d", ["Drop the selected"], one(drop)],
      relabel,
    ];
  }
  if (found.suggested === undefined) {
    return [["1", ["Keep"], all(keep)], ["d 2 Enter", ["Drop"], all(drop), true], relabel];
  }
  return [
    ["1", ["Keep ", bdi(found.images[0].given)], all(keep)],
    ["2 Enter", ["Change to ", bdi(found.suggested)], all({ action: "relabel", label: found.suggested }), true],
    relabel,
    ["d", ["Drop"], all(drop)],
  ];
}

function perform(action) {
  if (typeof action[2] === "function") action[2]();
  else decide(action[2]);
}

const sameDecision = (one, other) => one?.action === other?.action && (one?.label ?? null) === (other?.label ?? null);
const isChosen = (changes) => Array.isArray(changes) && changes.every(([key, change]) => sameDecision(decisions.get(key), change));

// --- the finding -----------------------------------------------------------------------------

function title(found) {
  if (found.classes) {
    const [first, second] = found.classes.map(bdi);
    if (!second) return [first, ` has only ${count(found.count, "image")}`];
    return [first, " and ", second, found.reason === "same" ? " look like one class" : " overlap"];
  }
  if (found.images.length > 1) {
    const splits = [...new Set(found.images.map((image) => splitOf(image.key)))];
    return [`${found.images.length} ${kind.name === "groups" ? "images" : "copies"} in ${splits.join(" and ")}`];
  }
  const given = bdi(found.images[0].given);
  if (found.suggested === undefined) return [REASONS[found.reason] ?? found.reason];
  return [given, element("span", { class: "arrow", role: "img", "aria-label": "perhaps" }, "→"), bdi(found.suggested), "?"];
}

const mark = (key) => decisions.has(key)
  ? element("span", { class: `mark ${decisions.get(key).action}` }, bdi(describe(decisions.get(key)))) : null;

function renderFinding() {
  const main = $("finding");
  if (!kind.keys.length) return main.replaceChildren(element("p", { class: "empty" }, `No ${kind.title.toLowerCase()} found.`));
  const found = finding(current);
  if (!found) return main.replaceChildren(element("p", { class: "empty" }, "Loading…"));
  main.className = `finding ${found.classes ? "classes" : found.examples.length ? "" : "wide"}`;
  const hints = [];
  if (found.score !== undefined) hints.push(`score ${found.score.toFixed(2)}`);
  if (found.classes && found.classes.length > 1) hints.push(found.classes.map((each, index) => `${each}: ${count(found.sizes[index], "image")}`).join(", "));
  if (found.images.length === 1 && found.suggested === undefined) hints.push(`labeled ${found.images[0].given}`);
  if (kind.name !== "groups" && new Set(found.images.map((image) => image.given)).size > 1) hints.push("their labels differ");
  const total = kind.keys.length;
  const step = (by, label, text) => element("button", { type: "button", "aria-label": label, click: () => goTo(current + by), disabled: current + by < 0 || current + by >= total }, text);
  const about = element("div", { class: "about" },
    element("h2", { id: "finding-title" }, ...title(found)),
    element("p", { class: "hint" }, hints.join(" · ")),
    element("div", { class: "steps" }, step(-1, "Previous finding", "‹"), `${(current + 1).toLocaleString("en")} of ${total.toLocaleString("en")}`, step(1, "Next finding", "›")));
  const buttons = actions(found).map((action) => element("button", {
    type: "button", class: action[3] ? "primary" : null, "aria-keyshortcuts": action[0].replace("M", "Shift+M"),
    "aria-pressed": Array.isArray(action[2]) ? String(isChosen(action[2])) : null, click: () => { perform(action); main.focus({ preventScroll: true }); },
  }, element("kbd", { "aria-hidden": "true" }, action[0].replace("M", "⇧m").split(" ")[0]), element("span", {}, ...action[1])));
  const isGroup = found.images.length > 1;
  const cards = found.images.map((image, index) => {
    const content = [
      picture(image.key, isGroup ? "medium" : "large", `${image.given}: ${image.path}`),
      element("span", { class: "caption" }, isGroup ? element("b", {}, splitOf(image.key), " · ", bdi(image.given)) : null, mark(image.key),
        element("span", { class: "file" }, bdi(image.path))),
    ];
    if (!isGroup) return element("div", { class: "picture-card" }, ...content);
    return element("button", { type: "button", class: "picture-card", "aria-pressed": String(index === selected), click: () => { selected = index; renderFinding(); main.focus({ preventScroll: true }); } }, ...content);
  });
  const examples = found.examples.filter(([, keys]) => keys.length).map(([label, keys]) => element("div", {},
    element("h3", {}, found.classes ? "" : "Most similar, labeled ", element("b", {}, bdi(label))),
    element("div", { class: "thumbs" }, ...keys.map((key) => picture(key, "small", label)))));
  main.replaceChildren(about, element("div", { class: "actions", role: "group", "aria-label": "Decision" }, ...buttons),
    ...(found.classes ? [] : [element("div", { class: isGroup ? `pictures ${cards.length > 4 ? "many" : ""}` : "pictures single" }, ...cards)]),
    element("div", { class: "examples" }, ...(found.classes ? [mark(kind.keys[current][0])].filter(Boolean) : []), ...examples));
}

// --- the list: only its visible rows are in the page -----------------------------------------

const rows = new Map(); // rows in the document by index
function row(index) {
  const found = finding(index);
  const keys = kind.keys[index];
  const made = element("button", { type: "button", class: "row", tabindex: "-1", style: `top: ${index * ROW_PIXELS}px`, "aria-current": index === current ? "true" : null, click: () => goTo(index) });
  if (!found) { made.append(element("span", { class: "frame" })); return made; }
  const key = found.images[0]?.key ?? found.examples[0]?.[1][0];
  const decided = keys.filter((each) => decisions.has(each));
  let state = null;
  if (decided.length && keys.length > 1) state = element("span", { class: "mark" }, decided.length === keys.length ? "done" : `${decided.length} of ${keys.length}`);
  else if (decided.length) {
    const { action } = decisions.get(keys[0]);
    state = element("span", { class: `mark ${action}` }, DONE[action]);
  }
  made.append(key ? picture(key, "small", "") : element("span", { class: "frame" }),
    element("span", {}, element("span", { class: "text" }, ...title(found)),
      element("span", { class: "text hint" }, bdi(found.images[0]?.path ?? ""))), state ?? "");
  made.dataset.loaded = "";
  return made;
}

function renderRows(redrawn = () => false) {
  const list = $("list");
  $("rows").style.height = `${kind.keys.length * ROW_PIXELS}px`;
  const first = Math.max(0, Math.floor(list.scrollTop / ROW_PIXELS) - 5);
  const last = Math.min(kind.keys.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW_PIXELS) + 5);
  for (const [index, old] of rows) {
    if (index < first || index >= last || redrawn(index) || !("loaded" in old.dataset)) { old.remove(); rows.delete(index); }
  }
  if (!list.clientHeight) return; // hidden on a small screen
  for (let index = first; index < last; index++) {
    if (!rows.has(index)) { rows.set(index, row(index)); $("rows").append(rows.get(index)); }
  }
}
$("list").addEventListener("scroll", () => requestAnimationFrame(() => renderRows()));
addEventListener("resize", () => renderRows());

function render() {
  let total = 0, decided = 0;
  $("kinds").replaceChildren(...data.kinds.map((each) => {
    const done = countDecided(each);
    total += each.keys.length;
    decided += done;
    return element("button", {
      type: "button", "aria-current": each === kind ? "true" : null,
      click: () => { kind = each; goTo(Math.max(0, nextUndecided(kind, -1))); },
    }, each.title, element("span", { class: "count" }, each.keys.length ? `${done.toLocaleString("en")}/${each.keys.length.toLocaleString("en")}` : "0"));
  }));
  $("kinds").querySelector("[aria-current]").scrollIntoView({ block: "nearest", inline: "nearest" });
  $("note").textContent = [kind.expected, kind.left_out].filter(Boolean).join(" ");
  $("progress-text").textContent = `${decided.toLocaleString("en")} of ${total.toLocaleString("en")} decided`;
  $("progress").max = Math.max(total, 1);
  $("progress").value = decided;
  $("undo").disabled = !undoSteps.length;
  renderFinding();
  renderRows(() => true);
}

function goTo(index) {
  const isOther = kind !== goTo.kind;
  goTo.kind = kind;
  current = Math.min(Math.max(index, 0), Math.max(kind.keys.length - 1, 0));
  const open = kind.keys[current]?.findIndex((key) => !decisions.has(key)) ?? 0;
  selected = Math.max(open, 0);
  const list = $("list"), top = current * ROW_PIXELS;
  if (isOther) list.scrollTop = Math.max(0, top - list.clientHeight / 2);
  $("rows").style.height = `${kind.keys.length * ROW_PIXELS}px`;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW_PIXELS > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_PIXELS - list.clientHeight;
  render();
  $("finding").scrollTop = 0;
  if (!document.querySelector("dialog[open]")) $("finding").focus({ preventScroll: true });
  if (data.pictures) return;
  // load ahead, so that no key has to wait
  finding(current + PAGE / 2);
  const next = finding(current + 1)?.images[0];
  if (next) new Image().src = `picture/large/${next.key}`;
}

// --- dialogs ---------------------------------------------------------------------------------

let labelChoice = null; // what the label dialog is about
function chooseLabel(found) {
  const image = found.images[selected];
  const label = decisions.get(image?.key)?.label ?? image?.given;
  labelChoice = {
    found, key: kind.keys[current][found.classes ? 0 : selected], active: 0, shown: [],
    labels: new Set(data.multilabel && label && label !== "[]" ? label.split("|") : []),
  };
  $("label-title").textContent = found.classes ? `Merge “${found.classes[0]}” into` : data.multilabel ? "Labels of this image" : "Label of this image";
  $("label-done").hidden = !data.multilabel || Boolean(found.classes);
  $("label-input").value = "";
  $("label-input").placeholder = $("label-done").hidden ? "Type to search" : "Type to search; Enter adds or removes, Ctrl+Enter applies";
  $("label-dialog").showModal();
  renderLabels();
}

function renderLabels() {
  const words = $("label-input").value.toLowerCase();
  const { found, labels } = labelChoice;
  const first = new Set([found.suggested, ...found.examples.map(([label]) => label)]);
  const rank = (label) => (label.toLowerCase().startsWith(words) ? 0 : 1) - (first.has(label) ? 2 : 0);
  labelChoice.shown = data.classes.filter((label) => label.toLowerCase().includes(words) && label !== found.classes?.[0])
    .map((label) => [rank(label), label]).sort((a, b) => a[0] - b[0]).slice(0, 100).map(([, label]) => label);
  labelChoice.active = Math.max(0, Math.min(labelChoice.active, labelChoice.shown.length - 1));
  $("label-options").replaceChildren(...labelChoice.shown.map((label, index) => element("li", {
    role: "option", id: `label-${index}`, class: index === labelChoice.active ? "active" : null, "aria-selected": String(index === labelChoice.active),
    "aria-checked": data.multilabel ? String(labels.has(label)) : null, click: () => takeLabel(label),
  }, bdi(label))));
  $("label-input").setAttribute("aria-activedescendant", `label-${labelChoice.active}`);
  $(`label-${labelChoice.active}`)?.scrollIntoView({ block: "nearest" });
}

function takeLabel(label) {
  if (!label) return;
  const { found, key, labels } = labelChoice;
  if (data.multilabel && !found.classes) {
    if (!labels.delete(label)) labels.add(label);
    return renderLabels();
  }
  $("label-dialog").close();
  decide([[key, found.classes ? { action: "merge", given: found.classes[0], label } : { action: "relabel", label }]]);
}

$("label-input").addEventListener("input", () => { labelChoice.active = 0; renderLabels(); });
$("label-input").addEventListener("keydown", (event) => {
  event.stopPropagation(); // Enter closes the dialog, and must not decide the next finding too
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    labelChoice.active += event.key === "ArrowDown" ? 1 : -1;
    renderLabels();
  } else if (event.key === "Enter") {
    if (event.ctrlKey || event.metaKey) $("label-done").click();
    else takeLabel(labelChoice.shown[labelChoice.active]);
  } else return;
  event.preventDefault();
});
$("label-done").addEventListener("click", () => {
  $("label-dialog").close();
  const label = data.classes.filter((each) => labelChoice.labels.has(each)).join("|") || "[]";
  decide([[labelChoice.key, { action: "relabel", label }]]);
});

function finish() {
  const left = data.kinds.reduce((sum, each) => sum + each.keys.length - countDecided(each), 0);
  const totals = new Map();
  for (const { action } of decisions.values()) totals.set(action, (totals.get(action) ?? 0) + 1);
  $("finish-title").textContent = left ? `${count(left, "finding")} left` : "All findings are decided";
  $("finish-counts").textContent = [...totals].map(([action, number]) => `${number.toLocaleString("en")} ${DONE[action]}`).join(", ") || "No decisions yet.";
  $("finish-how").textContent = data.pictures ? "Save the decisions, and train with them:" : `The decisions are in ${data.decisions_file}. Train with them:`;
  $("command").textContent = data.command;
  const test = [...decisions].filter(([key, each]) => each.action !== "keep" && splitOf(key) === "test").length;
  $("finish-test").hidden = !test;
  $("finish-test").textContent = `${count(test, "decision")} about test images: applied only with data.decisions_on_test=true, because they change what is measured.`;
  $("finish-classes").textContent = warnOfSmallClasses();
  $("finish-classes").hidden = !$("finish-classes").textContent;
  if (data.pictures) {
    URL.revokeObjectURL($("download").href);
    $("download").href = URL.createObjectURL(new Blob([toCsv()], { type: "text/csv" }));
    $("download").hidden = !decisions.size;
    $("finish-left-out").textContent = data.kinds.filter((each) => each.left_out).map((each) => `${each.title}: ${each.left_out}`).join(" ");
  }
  $("finish-dialog").showModal();
}

$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(data.command);
    announce("Copied.");
    $("copy").textContent = "Copied";
    setTimeout(() => { $("copy").textContent = "Copy command"; }, 2000);
  } catch { getSelection().selectAllChildren($("command")); }
});
for (const button of document.querySelectorAll("dialog .close")) button.addEventListener("click", () => button.closest("dialog").close());
$("undo").addEventListener("click", undo);
$("help-button").addEventListener("click", () => $("help-dialog").showModal());
$("finish-button").addEventListener("click", finish);

// --- keyboard --------------------------------------------------------------------------------

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const onButton = event.target.closest?.("button, a") !== null && event.target !== document.body;
  if (event.key === "Enter" && onButton) return;
  const found = kind.keys.length ? finding(current) : undefined;
  const isGroup = found && found.images.length > 1;
  const across = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const along = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
  const keyOf = (action) => action[0].split(" ");
  const action = found && actions(found).find((each) => keyOf(each).includes(event.key));
  if (action) perform(action);
  else if (along || (across && !isGroup)) goTo(current + (along ?? across));
  else if (across) { selected = Math.min(Math.max(selected + across, 0), found.images.length - 1); renderFinding(); }
  else if (event.key === "n") goToUndecided();
  else if (event.key === "u") undo();
  else if (event.key === "0" && found) decide(kind.keys[current].filter((key) => decisions.has(key)).map((key) => [key, null]));
  else if (event.key === "?") $("help-dialog").showModal();
  else return;
  event.preventDefault();
});

if (!data.findings) data.kinds.forEach((each) => finding(Math.max(0, nextUndecided(each, -1)), each));
kind = data.kinds.find((each) => nextUndecided(each, -1) >= 0) ?? data.kinds.find((each) => each.keys.length) ?? kind;
goTo(Math.max(0, nextUndecided(kind, -1)));
