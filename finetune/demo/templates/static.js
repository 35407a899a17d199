// Classify an image in the browser with model.onnx, which takes uint8 pixels (1, H, W, 3) of any size.

const element = (id) => document.getElementById(id);
const { classes, thresholds, topK, noLabel, modelSha256 } = JSON.parse(element("content").textContent);
const STRIP_PIXELS = 4e6; // read the pixels in strips: some browsers limit the size of a canvas
let newest = 0; // number of the newest image; answers for older ones are not shown
let stream = null; // of the camera

const dark = matchMedia("(prefers-color-scheme: dark)");
const setTheme = () => document.body.classList.toggle("dark", dark.matches);
dark.addEventListener("change", setTheme);
setTheme();

async function downloadModel() {
  // the query keeps the browser from using a cached model of an earlier page
  const response = await fetch(`model.onnx?sha256=${modelSha256}`);
  if (!response.ok) throw new Error(`model.onnx: the server answers ${response.status}`);
  const total = Number(response.headers.get("Content-Length"));
  const reader = response.body.getReader();
  const parts = [];
  let received = 0;
  for (let part; !(part = await reader.read()).done; parts.push(part.value)) {
    received += part.value.length;
    const share = total >= received ? `${Math.floor((100 * received) / total)} %` : `${received >> 20} MB`;
    element("progress").textContent = `Loading the model: ${share}`;
  }
  const model = await new Blob(parts).arrayBuffer();
  // only pages from HTTPS or localhost have crypto.subtle
  if (crypto.subtle && toHex(await crypto.subtle.digest("SHA-256", model)) !== modelSha256) {
    throw new Error("model.onnx does not belong to this page; reload the page, or publish the whole folder again");
  }
  return new Uint8Array(model);
}

const toHex = (buffer) => [...new Uint8Array(buffer)].map((byte) => byte.toString(16).padStart(2, "0")).join("");

async function load() {
  if (location.protocol === "file:") {
    throw new Error("Browsers do not load models from files; serve the folder, for example with: python -m http.server");
  }
  const [ort, model] = await Promise.all([import("./ort.js"), downloadModel()]);
  element("progress").textContent = "Starting the model";
  ort.env.wasm.proxy = true; // run in a worker, so that the page stays responsive
  const session = await ort.InferenceSession.create(model);
  const run = async (pixels, height, width) => {
    const image = new ort.Tensor("uint8", pixels, [1, height, width, 3]);
    return (await session.run({ image })).probabilities.data;
  };
  await run(new Uint8Array(3 * 256 * 256), 256, 256); // the first run is slow
  element("progress").textContent = "The model is loaded. Images stay in this browser.";
  return run;
}

const model = load();
model.catch((error) => showError("The model could not be loaded", error));

/** Return the RGB pixels of a bitmap, over white where it is transparent. */
function readPixels(bitmap) {
  const { width, height } = bitmap;
  const pixels = new Uint8Array(3 * width * height);
  const rows = Math.max(1, Math.min(height, Math.floor(STRIP_PIXELS / width)));
  const canvas = new OffscreenCanvas(width, rows);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  for (let top = 0, target = 0; top < height; top += rows) {
    context.fillStyle = "#fff";
    context.fillRect(0, 0, width, rows);
    context.drawImage(bitmap, 0, -top);
    const { data } = context.getImageData(0, 0, width, Math.min(rows, height - top));
    for (let source = 0; source < data.length; source += 4) {
      pixels[target++] = data[source];
      pixels[target++] = data[source + 1];
      pixels[target++] = data[source + 2];
    }
  }
  return pixels;
}

/** Classify a file or a video frame. Returns: the probabilities. */
async function classify(source) {
  // upright by its EXIF orientation, and without color management, as in training
  const bitmap = await createImageBitmap(source, { imageOrientation: "from-image", colorSpaceConversion: "none" });
  const scale = Math.min(1, 1024 / Math.max(bitmap.width, bitmap.height));
  const preview = element("preview");
  preview.width = Math.max(1, Math.round(bitmap.width * scale));
  preview.height = Math.max(1, Math.round(bitmap.height * scale));
  preview.getContext("2d").drawImage(bitmap, 0, 0, preview.width, preview.height);
  preview.hidden = false;
  element("hint").hidden = true;
  const run = await model;
  return run(readPixels(bitmap), bitmap.height, bitmap.width);
}

async function show(source) {
  const number = ++newest;
  element("ft-output").setAttribute("aria-busy", "true");
  try {
    const probabilities = await classify(source);
    if (number === newest) showResult(probabilities);
  } catch (error) {
    if (number === newest) showError("The image could not be classified", error);
  }
  element("ft-output").setAttribute("aria-busy", "false");
}

function formatProbability(value) {
  if (value < 0.0005) return "< 0.1 %";
  return value >= 0.9995 && value < 1 ? "> 99.9 %" : `${(100 * value).toFixed(1)} %`;
}

function showResult(probabilities) {
  const order = [...probabilities.keys()].sort((a, b) => probabilities[b] - probabilities[a]);
  const isPredicted = (k) => thresholds !== null && probabilities[k] >= thresholds[k];
  const list = document.createElement("ol");
  list.className = thresholds ? "ft-top ft-several" : "ft-top";
  for (const k of order.filter((k, rank) => rank < topK || isPredicted(k))) {
    const row = element("row").content.firstElementChild.cloneNode(true);
    row.classList.toggle("ft-predicted", isPredicted(k));
    row.querySelector(".ft-name").textContent = classes[k];
    row.querySelector(".ft-share").firstChild.data = formatProbability(probabilities[k]);
    row.querySelector(".ft-bar i").style.width = `${100 * probabilities[k]}%`;
    const [mark, text] = [".ft-bar b", ".ft-hidden"].map((name) => row.querySelector(name));
    if (thresholds) {
      mark.style.left = `${100 * thresholds[k]}%`;
      text.textContent = `, threshold ${formatProbability(thresholds[k])}`;
    } else [mark, text].forEach((part) => part.remove());
    list.append(row);
  }
  const section = document.createElement("section");
  section.className = "ft-result";
  if (thresholds) {
    const labels = document.createElement("p");
    labels.className = "ft-labels";
    labels.textContent = order.filter(isPredicted).map((k) => classes[k]).join(", ") || noLabel;
    section.append(labels);
  }
  section.append(list);
  element("ft-output").replaceChildren(section);
}

function showError(what, error) {
  const box = element("error").content.firstElementChild.cloneNode(true);
  const [head, detail] = box.querySelectorAll("p");
  head.textContent = what;
  detail.textContent = error.message ?? error;
  element("ft-output").replaceChildren(box);
}

// --- images: chosen, dropped, from the camera ---

function stopCamera() {
  stream?.getTracks().forEach((track) => track.stop());
  stream = null;
  element("video").hidden = true;
  element("camera").textContent = "Use the camera";
}

function accept(file) {
  if (!file) return;
  stopCamera();
  show(file);
}

const [zone, file, video] = [element("ft-image"), element("file"), element("video")];
element("choose").addEventListener("click", () => file.click());
zone.addEventListener("click", () => stream || file.click());
file.addEventListener("change", () => {
  accept(file.files[0]);
  file.value = ""; // so that the same file can be chosen again
});
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    zone.classList.toggle("ft-over", name === "dragover");
    if (name === "drop") accept(event.dataTransfer.files[0]);
  });
}

element("camera").hidden = !navigator.mediaDevices?.getUserMedia; // it needs HTTPS or localhost
element("camera").addEventListener("click", async () => {
  if (stream) {
    const frame = await createImageBitmap(video);
    stopCamera();
    show(frame);
    return;
  }
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    video.srcObject = stream;
    await video.play();
    for (const other of ["hint", "preview"]) element(other).hidden = true;
    video.hidden = false;
    element("camera").textContent = "Take a photo";
  } catch (error) {
    stopCamera();
    showError("The camera cannot be used", error);
  }
});
