// Trains in Node, and prints what Python compares: node steps.mjs FOLDER STEPS STATE
import { writeFile } from 'node:fs/promises';
import { order } from 'kfac-engine';
import { all, digits, load } from './setup.mjs';

const [folder, steps, state] = process.argv.slice(2);
const { train, images, labels } = await digits();
const trainer = await load(folder);
const data = { image: images.subarray(0, 64 * train), targets: labels.subarray(0, train) };
const rate = (step) => Math.min(1, (1 - step / Number(steps)) / 0.4);
const batches = trainer.batches(data, { size: 64, epochs: 10, seed: 1 });
const records = await all(trainer.fit(batches, { steps: Number(steps), rate }));
const numbers = [...order(train, { size: 64, epochs: 10, seed: 1 })].slice(0, Number(steps)).map((n) => [...n]);
const heldOut = { image: images.subarray(64 * train), targets: labels.subarray(train) };
const { logits } = await trainer.predict({ image: heldOut.image.subarray(0, 320) });
await writeFile(state, await trainer.save());
process.stdout.write(JSON.stringify({
  numbers,
  losses: records.map((record) => record.loss),
  accuracies: records.map((record) => record.accuracy),
  metrics: await trainer.evaluate(trainer.batches(heldOut, { size: 100, shuffle: false })),
  logits: [...logits.data],
  dims: logits.dims,
}));
