// The loop of a run, for any module of ONNX Runtime: onnxruntime-web in a page or in Node.

/** Open the files of one optimizer; `read(name)` returns the bytes of a file, and `examples` come again and again. */
export async function open(ort, read, examples) {
  // The steps take as long without the runtime's optimizations, which take a third of the time to open.
  const options = { graphOptimizationLevel: 'disabled', logSeverityLevel: 3 };
  const create = async (name) => ort.InferenceSession.create(await read(name), options);
  const [training, initial, predict] = await Promise.all(['training', 'initial', 'predict'].map((n) => create(`${n}.onnx`)));
  const state = { ...(await initial.run({})) };
  const different = 'different examples'; // K-FAC shrinks weights more if there are few
  if (different in state) state[different] = new ort.Tensor('float32', Float32Array.of(examples), []);
  return { ort, training, predict, state, losses: [], milliseconds: 0 };
}

/** Take one step; return its loss. An output without entries keeps the old state. */
export async function step(model, feeds, rate) {
  const start = performance.now();
  const value = new model.ort.Tensor('float32', Float32Array.of(rate), []);
  const results = await model.training.run({ ...feeds, rate: value, ...model.state });
  for (const name in model.state) {
    if (results[`new ${name}`].size) model.state[name] = results[`new ${name}`];
  }
  model.milliseconds += performance.now() - start;
  model.losses.push(results.loss.data[0]);
  return results.loss.data[0];
}

/** Return the logits of some images. */
export async function predict(model, image) {
  const weights = model.predict.inputNames.filter((name) => name in model.state).map((name) => [name, model.state[name]]);
  return (await model.predict.run({ image, ...Object.fromEntries(weights) })).logits.data;
}

/** Read the digits: the number of those to train on, images of 64 bytes from 0 to 16, and labels. */
export function digits(bytes) {
  const [count, train] = new Uint32Array(bytes.slice(0, 8).buffer);
  const images = Float32Array.from(bytes.subarray(8, 8 + 64 * count), (pixel) => pixel / 16);
  return { train, count, images, labels: bytes.subarray(8 + 64 * count) };
}

/** Return tensors of the digits with these numbers. */
export function batch(ort, data, numbers) {
  const image = new Float32Array(64 * numbers.length);
  numbers.forEach((number, i) => image.set(data.images.subarray(64 * number, 64 * number + 64), 64 * i));
  return {
    image: new ort.Tensor('float32', image, [numbers.length, 1, 8, 8]),
    targets: new ort.Tensor('int64', BigInt64Array.from(numbers, (n) => BigInt(data.labels[n])), [numbers.length]),
  };
}

/** Yield the numbers of the digits of each batch, in a new order for each epoch. */
export function* orders(train, size, seed) {
  let state = seed >>> 0;
  const random = (below) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
  for (;;) {
    const order = Array.from({ length: train }, (_, i) => i);
    for (let i = train - 1; i > 0; i--) {
      const j = random(i + 1);
      [order[i], order[j]] = [order[j], order[i]];
    }
    for (let start = 0; start + size <= train; start += size) yield order.slice(start, start + size);
  }
}

/** Return the loss and the accuracy on the digits that are held out. */
export async function heldOut(model, data) {
  const numbers = Array.from({ length: data.count - data.train }, (_, i) => data.train + i);
  const logits = await predict(model, batch(model.ort, data, numbers).image);
  let loss = 0;
  let hits = 0;
  numbers.forEach((number, i) => {
    const row = logits.subarray(10 * i, 10 * i + 10);
    const largest = Math.max(...row);
    loss += largest + Math.log(row.reduce((sum, z) => sum + Math.exp(z - largest), 0)) - row[data.labels[number]];
    hits += row.indexOf(largest) === data.labels[number];
  });
  return { loss: loss / numbers.length, accuracy: hits / numbers.length };
}

/** Return the value of the schedule: one, and falling to zero in the last two fifths of the run. */
export const schedule = (done) => Math.min(1, (1 - done) / 0.4);
