// Run an exported model in onnxruntime-web: images from standard input, probabilities to standard output.
// Usage: node onnxruntime_web.mjs PATH_OF_THE_PACKAGE MODEL
// Input: height and width as uint32, then the RGB pixels. Output: the number of classes as uint32, then float32.

import { readFileSync, readSync, writeSync } from "node:fs";
import { pathToFileURL } from "node:url";

process.on("uncaughtException", (error) => {
  console.error(String(error.message ?? error).split("\n")[0]);
  process.exit(1);
});

const [ortWeb, model] = process.argv.slice(2);
const ort = await import(pathToFileURL(`${ortWeb}/dist/ort.node.min.mjs`));
ort.env.wasm.numThreads = 1;
const session = await ort.InferenceSession.create(readFileSync(model));

function read(count) {
  const bytes = new Uint8Array(count);
  for (let start = 0; start < count; ) {
    const received = readSync(0, bytes, start, count - start);
    if (received === 0) process.exit(0);
    start += received;
  }
  return bytes;
}

function write(bytes) {
  for (let start = 0; start < bytes.length; ) start += writeSync(1, bytes, start);
}

for (;;) {
  const [height, width] = new Uint32Array(read(8).buffer);
  const image = new ort.Tensor("uint8", read(height * width * 3), [1, height, width, 3]);
  const { probabilities } = await session.run({ image });
  const { data } = probabilities;
  write(new Uint8Array(new Uint32Array([data.length]).buffer));
  write(new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
  image.dispose();
  probabilities.dispose();
}
