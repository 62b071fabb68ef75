// Measures what a step of the package takes beyond the bare loop of the README of a folder, on
// equal batches and equal states, one after the other: node overhead.mjs FOLDER STEPS
import { readFile } from 'node:fs/promises';
import { digits, FILES, load, OPTIONS } from './setup.mjs';

const [folder, steps] = [process.argv[2], Number(process.argv[3])];
const { InferenceSession, Tensor } = OPTIONS.runtime;
const { images, labels } = await digits();
const data = { image: images.subarray(0, 64 * 128), targets: BigInt64Array.from(labels.subarray(0, 128), BigInt) };
const trainer = await load(folder);
const [training, initial] = await Promise.all(['training', 'initial'].map(async (name) =>
  InferenceSession.create(new Uint8Array(await readFile(`${FILES}/${folder}/${name}.onnx`)), OPTIONS.session)));
const state = { ...(await initial.run({})) };
async function bare() {
  const batch = { image: new Tensor('float32', data.image, [128, 1, 8, 8]), targets: new Tensor('int64', data.targets, [128]) };
  const result = await training.run({ ...batch, rate: new Tensor('float32', [1], []), ...state });
  for (const name in state) if (result[`new ${name}`].size) state[name] = result[`new ${name}`];
  return result.loss.data[0];
}
function* endless() {
  for (;;) yield data;
}
const records = trainer.fit(endless());
const times = { bare: [], package: [] };
// Both take the steps 1, 2, … of one run in turns, each first in every other pair; the machine's
// other processes disturb both alike.
for (let i = 0; i < steps; i++) {
  const losses = {};
  for (const kind of i % 2 ? ['bare', 'package'] : ['package', 'bare']) {
    const start = process.cpuUsage();
    losses[kind] = kind === 'bare' ? await bare() : (await records.next()).value.loss;
    const { user, system } = process.cpuUsage(start);
    times[kind].push((user + system) / 1e3);
  }
  if (losses.bare !== losses.package) throw new Error(`step ${i}: ${losses.bare} is not ${losses.package}`);
}
const median = (values) => values.toSorted((a, b) => a - b)[values.length >> 1];
const bareTime = median(times.bare);
const difference = median(times.package.map((time, i) => time - times.bare[i]));
process.stdout.write(JSON.stringify({ bare: bareTime, difference, overhead: difference / bareTime }));
