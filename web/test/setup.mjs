// What the tests in Node share: the runtime, and the folders that Python wrote into FILES.
import { readFile } from 'node:fs/promises';
import * as ort from 'onnxruntime-web';
import { Trainer } from 'kfac-engine';

export const FILES = process.env.FILES;
export const OPTIONS = { runtime: ort, wasm: { numThreads: 1 } };
export const load = (name, options = {}) => Trainer.load(`${FILES}/${name}`, { ...OPTIONS, ...options });

/** The digits: images from 0 to 1 and labels; the first `train` are for training. */
export async function digits() {
  const bytes = new Uint8Array(await readFile(`${FILES}/digits.bin`));
  const [count, train] = new Uint32Array(bytes.slice(0, 8).buffer);
  const images = Float32Array.from(bytes.subarray(8, 8 + 64 * count), (pixel) => pixel / 16);
  return { train, images, labels: bytes.subarray(8 + 64 * count) };
}

export async function all(records) {
  const found = [];
  for await (const record of records) found.push(record);
  return found;
}
