import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';
import { test } from 'node:test';
import { Trainer, TrainingError, serve } from 'kfac-engine';
import { all, digits, FILES, load, OPTIONS } from './setup.mjs';

const { train, images, labels } = await digits();
const data = { image: images.subarray(0, 64 * train), targets: labels.subarray(0, train) };
const batchesOf = (trainer, options = {}) => trainer.batches(data, { size: 32, seed: 3, ...options });
const equal = (one, other) => assert.deepEqual(Buffer.from(one), Buffer.from(other));

test('a resumed run has the bits of one run', async () => {
  const whole = await load('kfac');
  await all(whole.fit(batchesOf(whole), { steps: 12 }));
  const first = await load('kfac');
  const batches = [...batchesOf(first)];
  const options = { examples: train };
  await all(first.fit(batches.slice(0, 5), options));
  const second = await Trainer.resume(`${FILES}/kfac`, await first.save(), OPTIONS);
  assert.equal(await second.steps(), 5);
  await all(second.fit(batches.slice(5, 12), options));
  equal(await second.save(), await whole.save());
});

test('the state of Python continues, and comes home', async () => {
  const saved = await readFile(`${FILES}/state.safetensors`);
  const trainer = await Trainer.resume(`${FILES}/kfac`, saved, OPTIONS);
  const expected = JSON.parse(await readFile(`${FILES}/state.json`, 'utf8'));
  assert.equal(await trainer.steps(), expected.step);
  const { loss } = await trainer.evaluate(batchesOf(trainer, { shuffle: false }));
  assert.ok(Math.abs(loss - expected.loss) < 1e-5, `${loss} is not ${expected.loss}`);
  const blob = await Trainer.resume(`${FILES}/kfac`, new Blob([saved]), OPTIONS);
  equal(await blob.save(), await trainer.save());
});

test('arrays of every kind give equal steps', async () => {
  const numbers = [0, 1, 2, 3];
  const image = images.subarray(0, 256);
  const forms = [
    { image, targets: [...labels.subarray(0, 4)] },
    { image: [...image], targets: labels.slice(0, 4) },
    { image: Float64Array.from(image), targets: BigInt64Array.from(labels.subarray(0, 4), BigInt) },
    { image: { data: image, dims: [4, 1, 8, 8] }, targets: Int32Array.from(numbers, (i) => labels[i]) },
    { image: new OPTIONS.runtime.Tensor('float32', image, [4, 1, 8, 8]), targets: Float32Array.from(numbers, (i) => labels[i]) },
  ];
  const losses = [];
  for (const batch of forms) losses.push((await all((await load('adamw')).fit([batch])))[0].loss);
  assert.ok(losses.every((loss) => loss === losses[0] && Number.isFinite(loss)));
});

test('weights that are not given are ones, and others count', async () => {
  const trainer = await load('weighted');
  const batch = { image: images.subarray(0, 256), targets: labels.subarray(0, 4) };
  const { loss } = await trainer.evaluate([batch]);
  assert.equal((await trainer.evaluate([{ ...batch, weights: [1, 1, 1, 1] }])).loss, loss);
  const first = { image: images.subarray(0, 64), targets: labels.subarray(0, 1) };
  const alone = (await trainer.evaluate([first])).loss;
  assert.ok(Math.abs((await trainer.evaluate([{ ...batch, weights: [2, 0, 0, 0] }])).loss - alone) < 1e-6);
});

test('an aborted run ends after a whole step, and goes on', async () => {
  const [trainer, whole] = await Promise.all([load('adamw'), load('adamw')]);
  const batches = [...batchesOf(trainer)].slice(0, 6);
  const control = new AbortController();
  const seen = [];
  await assert.rejects(async () => {
    for await (const { step } of trainer.fit(batches, { signal: control.signal })) {
      seen.push(step);
      if (step === 2) control.abort(new Error('enough'));
    }
  }, /enough/);
  assert.deepEqual(seen, [0, 1, 2]);
  await all(trainer.fit(batches.slice(3)));
  await all(whole.fit(batches));
  equal(await trainer.save(), await whole.save());
  await assert.rejects(all(trainer.fit(batches, { signal: AbortSignal.abort() })), { name: 'AbortError' });
  await assert.rejects(load('adamw', { signal: AbortSignal.abort() }), { name: 'AbortError' });
});

test('a loop that is left early takes no further step', async () => {
  const trainer = await load('adamw');
  for await (const { step } of trainer.fit(batchesOf(trainer))) if (step === 1) break;
  assert.equal(await trainer.steps(), 2);
});

test('a step that is not finite changes nothing', async () => {
  const trainer = await load('kfac');
  const before = await trainer.save();
  const broken = { image: images.slice(0, 256), targets: labels.subarray(0, 4) };
  broken.image[7] = NaN;
  const [record] = await all(trainer.fit([broken]));
  assert.equal(record.finite, false);
  assert.ok(Number.isNaN(record.loss));
  equal(await trainer.save(), before);
  await assert.rejects(trainer.evaluate([broken]), /not finite/);
});

test('calls that overlap take whole steps one after the other', async () => {
  const trainer = await load('adamw');
  const batches = [...batchesOf(trainer)].slice(0, 4);
  const runs = await Promise.all([all(trainer.fit(batches)), all(trainer.fit(batches))]);
  await trainer.predict({ image: images.subarray(0, 64) });
  assert.equal(await trainer.steps(), 8);
  assert.deepEqual(runs.flat().map(({ step }) => step).sort((a, b) => a - b), [0, 1, 2, 3, 4, 5, 6, 7]);
});

test('batches have each example once in an epoch, and all of them without shuffling', async () => {
  const trainer = await load('adamw');
  const few = { image: images.subarray(0, 64 * 10), targets: Array.from({ length: 10 }, (_, i) => i) };
  const targets = (options) => [...trainer.batches(few, options)].map((batch) => [...batch.targets.data].map(Number));
  const ordered = targets({ size: 4, shuffle: false });
  assert.deepEqual(ordered, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]);
  const shuffled = targets({ size: 5, epochs: 2, seed: 4 });
  assert.equal(shuffled.length, 4);
  assert.deepEqual(shuffled.slice(0, 2).flat().sort(), [...few.targets]);
  assert.notDeepEqual(shuffled.slice(0, 2), shuffled.slice(2));
  assert.deepEqual(targets({ size: 64 }).map((batch) => batch.length), [10]);
  assert.equal(trainer.batches(few).examples, 10);
  const [first] = trainer.batches(few, { size: 3, seed: 1 });
  const number = Number(first.targets.data[1]); // of the same example
  assert.deepEqual([...first.image.data.subarray(64, 128)], [...few.image.subarray(64 * number, 64 * number + 64)]);
});

test('examples on another axis', async () => {
  const trainer = await load('sequence');
  const { input } = trainer.description.data;
  assert.deepEqual(input.shape, [4, 'batch', 3]);
  const arrays = { input: Float32Array.from({ length: 72 }, (_, i) => Math.sin(i)), targets: [0, 1, 2, 0, 1, 2] };
  const whole = await trainer.evaluate([arrays]);
  const parts = await trainer.evaluate(trainer.batches(arrays, { size: 2, shuffle: false }));
  assert.ok(Math.abs(whole.loss - parts.loss) < 1e-6);
});

const one = { image: images.subarray(0, 128), targets: labels.subarray(0, 2) };
// What is wrong, the batch, and what the message says.
const WRONG = [
  ['a name', { ...one, imgae: one.image }, /no input 'imgae'; their inputs are: image, targets/],
  ['an input is missing', { image: one.image }, /need 'targets'/],
  ['a length', { ...one, image: images.subarray(0, 100) }, /'image' has 100 entries, .*multiple of 64/],
  ['a number of examples', { ...one, targets: [1] }, /'image' has 2 examples and 'targets' has 1/],
  ['a shape', { ...one, image: { data: one.image, dims: [2, 64] } }, /'image' has the shape 2 × 64/],
  ['a fraction as a class', { ...one, targets: [1, 1.5] }, /'targets' cannot be int64: 1\.5/],
  ['a text', { ...one, image: new Array(128).fill('1') }, /'image' cannot be float32: 1 is no number/],
  ['no array', { ...one, image: 3 }, /'image' is no array/],
  ['no example', { image: new Float32Array(0), targets: [] }, /no example/],
];
for (const [what, batch, says] of WRONG) {
  test(`refused: ${what}`, async () => {
    const trainer = await load('adamw');
    const before = await trainer.save();
    await assert.rejects(all(trainer.fit([batch])), (error) => error instanceof TrainingError && says.test(error.message));
    await assert.rejects(trainer.evaluate([batch]), says);
    equal(await trainer.save(), before);
    await all(trainer.fit([one])); // and the trainer goes on
  });
}

test('refused: rates, sizes, files, states', async () => {
  const trainer = await load('adamw');
  for (const rate of [-1, NaN, Infinity, () => NaN]) await assert.rejects(all(trainer.fit([one], { rate })), /rate must be/);
  assert.throws(() => trainer.batches(data, { size: 0 }), /size must be/);
  assert.throws(() => trainer.batches({ ...data, rate: [1] }), /no input 'rate'/);
  await assert.rejects(load('nowhere'), /cannot read 'file:.*nowhere\/training\.onnx'.*export_training/);
  const read = (names) => (name) => readFile(`${FILES}/${names[name] ?? 'adamw'}/${name}`);
  await assert.rejects(Trainer.load(read({ 'predict.onnx': 'kfac' }), OPTIONS), /'training.onnx' and 'predict.onnx' belong to different exports/);
  await assert.rejects(Trainer.load(async () => new Uint8Array(40).fill(10), OPTIONS), /ends too early|no training file/);
  await assert.rejects(Trainer.load(() => readFile(`${FILES}/plain.onnx`), OPTIONS), /no training file/);
  await assert.rejects(Trainer.resume(`${FILES}/kfac`, await trainer.save(), OPTIONS), /belongs to the training files/);
  await assert.rejects(trainer.evaluate([]), /no batch/);
  await assert.rejects(trainer.evaluate([{ ...one, targets: [3, 10] }]), /no class/);
  await assert.rejects(trainer.save('name'), /no IndexedDB/);
  await trainer.release();
  await assert.rejects(trainer.steps(), /released/);
});

test('refused: damaged states, which change nothing', async () => {
  const trainer = await load('adamw');
  const saved = await trainer.save();
  const length = Number(new DataView(saved.buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(saved.subarray(8, 8 + length)));
  const changed = (change) => {
    const copy = structuredClone(header);
    change(copy);
    const text = new TextEncoder().encode(JSON.stringify(copy));
    const bytes = new Uint8Array(8 + text.length + saved.length - 8 - length);
    new DataView(bytes.buffer).setBigUint64(0, BigInt(text.length), true);
    bytes.set(text, 8);
    bytes.set(saved.subarray(8 + length), 8 + text.length);
    return bytes;
  };
  const name = 'fc.weight' in header ? 'fc.weight' : Object.keys(header).find((key) => header[key].shape?.length === 2);
  const DAMAGED = [
    [new Uint8Array(3), /no header/],
    [saved.subarray(0, 100), /longer than the file/],
    [saved.subarray(0, saved.length - 4), /wrong size/],
    [changed((h) => { delete h[name]; }), new RegExp(`has no '${name}'`)],
    [changed((h) => { h[name].dtype = 'BF16'; }), /type BF16/],
    [changed((h) => { h[name].shape = [-1, 2]; }), /no shape/],
    [changed((h) => { h[name].data_offsets = [0, 1e12]; }), /wrong size/],
    [changed((h) => { h[name].data_offsets = null; }), /no place/],
    [changed((h) => { h[name].shape.push(1); }), /the shape/],
    [changed((h) => { h.__metadata__ = {}; }), /belongs to/],
    [Uint8Array.of(2, 0, 0, 0, 0, 0, 0, 0, 91, 91), /no JSON/],
  ];
  for (const [bytes, says] of DAMAGED) {
    await assert.rejects(Trainer.resume(`${FILES}/adamw`, bytes, OPTIONS), (error) => error instanceof TrainingError && says.test(error.message), String(says));
  }
  equal(await (await Trainer.resume(`${FILES}/adamw`, saved, OPTIONS)).save(), saved);
});

test('a trainer behind a port does the same', async () => {
  const { port1, port2 } = new MessageChannel();
  serve(port2);
  let came = 0;
  const runtime = import.meta.resolve('onnxruntime-web');
  const { wasm, session } = OPTIONS;
  const there = await Trainer.load(`${FILES}/kfac`, { worker: port1, runtime, wasm, session, progress: (bytes) => { came = bytes; } });
  const here = await load('kfac');
  assert.deepEqual(there.description, here.description);
  assert.ok(came > 1e5);
  const records = await Promise.all([here, there].map((trainer) => all(trainer.fit(batchesOf(trainer), { steps: 6 }))));
  assert.deepEqual(records[0].map(({ loss }) => loss), records[1].map(({ loss }) => loss));
  equal(await there.save(), await here.save());
  const inputs = { image: images.subarray(0, 128) };
  assert.deepEqual((await there.predict(inputs)).logits.data, (await here.predict(inputs)).logits.data);
  assert.deepEqual(await there.evaluate([one]), await here.evaluate([one]));
  await assert.rejects(there.predict({}), (error) => error instanceof TrainingError && /'image'/.test(error.message));
  await assert.rejects(Trainer.load(async () => new Uint8Array(), { worker: port1 }), /address/);
  await there.release();
  port1.close();
});
