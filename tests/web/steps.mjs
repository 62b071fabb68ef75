// Takes steps in Node with the runtime of the page; prints the losses and the weights as JSON.
// node steps.mjs FOLDER DIGITS STEPS

import { readFile } from 'node:fs/promises';
import * as ort from 'onnxruntime-web';
import * as T from '../../docs/browser/train.mjs';

const [folder, digits, count] = process.argv.slice(2);
ort.env.wasm.numThreads = 1;
const data = T.digits(new Uint8Array(await readFile(digits)));
const model = await T.open(ort, async (name) => new Uint8Array(await readFile(`${folder}/${name}`)), data.train);
const orders = T.orders(data.train, 64, 1);
const numbers = [];
for (let i = 0; i < Number(count); i++) {
  numbers.push(orders.next().value);
  await T.step(model, T.batch(ort, data, numbers.at(-1)), T.schedule(i / Number(count)));
}
const weights = Object.fromEntries(model.predict.inputNames.filter((name) => name in model.state)
  .map((name) => [name, Array.from(model.state[name].data)]));
process.stdout.write(JSON.stringify({ numbers, losses: model.losses, weights, heldOut: await T.heldOut(model, data) }));
