// The page "Train in your browser": two runs at a time, their curves, and a field to draw in.

import * as T from './train.mjs';

const RUNS = [
  { name: 'kfac', label: 'K-FAC', steps: 110, variable: '--run-first' },
  { name: 'adamw', label: 'AdamW', steps: 220, variable: '--run-second' },
];
const BATCH = 128;
const EVERY = 6;
const find = (id) => document.getElementById(id);
const url = (path) => new URL(path, import.meta.url);
const pause = () => new Promise((resolve) => setTimeout(resolve, 0));
const page = { state: 'loading', runs: [] };
globalThis.trainer = page; // for tests, and for the curious

async function bytes(path) {
  const response = await fetch(url(path));
  if (!response.ok) throw new Error(`${path} is not on this site`);
  return new Uint8Array(await response.arrayBuffer());
}

// All files are asked for at once; the runtime, the largest one, starts with the first session.
async function load() {
  const names = ['training.onnx', 'initial.onnx', 'predict.onnx'];
  const paths = ['digits.bin', ...RUNS.flatMap((run) => names.map((name) => `${run.name}/${name}`))];
  const [ort, ...contents] = await Promise.all([import(url('ort/ort.wasm.min.mjs')), ...paths.map(bytes)]);
  const files = Object.fromEntries(paths.map((path, i) => [path, contents[i]]));
  ort.env.wasm.wasmPaths = url('ort/').href;
  ort.env.wasm.numThreads = 1;
  page.ort = ort;
  page.data = T.digits(files['digits.bin']);
  page.read = (run) => async (name) => files[`${run.name}/${name}`];
  await begin(); // the sessions exist before the first click
  page.state = 'ready';
  say('Everything is on this device now; the network is not needed any more.');
  find('trainer-start').disabled = false;
}

async function begin() {
  page.runs = [];
  for (const run of RUNS) {
    const start = performance.now();
    const model = await T.open(page.ort, page.read(run), page.data.train);
    const created = performance.now() - start;
    await warmUp(model);
    page.runs.push({ ...run, model, created, points: [], numbers: [], orders: T.orders(page.data.train, BATCH, 1) });
    await pause();
  }
}

// The browser compiles what runs first: two steps whose results are dropped.
async function warmUp(model) {
  const state = { ...model.state };
  const feeds = T.batch(page.ort, page.data, Array.from({ length: BATCH }, (_, i) => i));
  for (let i = 0; i < 2; i++) await T.step(model, feeds, 1);
  Object.assign(model, { state, losses: [], milliseconds: 0 });
}

// The run that has used less time takes the next step, so that both curves have the same clock.
async function train() {
  find('trainer-start').disabled = true;
  page.state = 'training';
  if (page.runs[0].model.losses.length) await begin();
  for (const run of page.runs) await measure(run);
  for (;;) {
    const open = page.runs.filter((run) => run.model.losses.length < run.steps);
    if (!open.length) break;
    const run = open.reduce((a, b) => (b.model.milliseconds < a.model.milliseconds ? b : a));
    const done = run.model.losses.length;
    const numbers = run.orders.next().value;
    run.numbers.push(numbers);
    await T.step(run.model, T.batch(page.ort, page.data, numbers), T.schedule(done / run.steps));
    if ((done + 1) % EVERY === 0 || done + 1 === run.steps) await measure(run);
    await pause();
  }
  page.state = 'done';
  say('Draw a digit below: the network that K-FAC trained reads it.');
  find('trainer-start').disabled = false;
  await read();
}

async function measure(run) {
  run.points.push({ seconds: run.model.milliseconds / 1e3, ...(await T.heldOut(run.model, page.data)) });
  show();
}

// -- curves ------------------------------------------------------------------------------------------

const style = (name) => getComputedStyle(find('trainer')).getPropertyValue(name);

function show() {
  const canvas = find('trainer-curves');
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const c = canvas.getContext('2d');
  c.scale(ratio, ratio);
  const far = Math.max(1, ...page.runs.flatMap((run) => run.points.map((p) => p.seconds)));
  const [least, largest] = [Math.log(0.01), Math.log(3)];
  const x = (seconds) => 36 + ((width - 46) * seconds) / far;
  const y = (loss) => 10 + ((height - 34) * (largest - Math.log(Math.min(3, Math.max(0.01, loss))))) / (largest - least);
  c.font = '12px sans-serif';
  c.fillStyle = style('--trainer-text');
  c.strokeStyle = style('--trainer-grid');
  for (const loss of [3, 1, 0.3, 0.1, 0.03, 0.01]) {
    c.fillText(loss, 4, y(loss) + 4);
    c.beginPath();
    c.moveTo(36, y(loss));
    c.lineTo(width - 10, y(loss));
    c.stroke();
  }
  for (let s = 0; s <= far; s += far > 6 ? 2 : far > 3 ? 1 : 0.5) c.fillText(`${s} s`, Math.min(x(s), width - 28), height - 6);
  c.lineWidth = 2;
  for (const run of page.runs) {
    c.strokeStyle = style(run.variable);
    c.beginPath();
    run.points.forEach((p, i) => c[i ? 'lineTo' : 'moveTo'](x(p.seconds), y(p.loss)));
    c.stroke();
  }
  for (const run of page.runs) {
    const last = run.points.at(-1);
    const cells = last && [run.label, `${run.model.losses.length}`, `${last.seconds.toFixed(2)} s`, last.loss.toFixed(3), `${(100 * last.accuracy).toFixed(1)} %`];
    if (cells) [...find(`trainer-${run.name}`).cells].forEach((cell, i) => { cell.textContent = cells[i]; });
  }
}

// -- drawing -----------------------------------------------------------------------------------------

const SIDE = 32;
const field = new Uint8Array(SIDE * SIDE);

// As in the data: the digit fills a square of 32 × 32 dots, and a pixel counts the dots of 4 × 4.
function pixels() {
  const dots = [...field.keys()].filter((i) => field[i]);
  const image = new Float32Array(64);
  if (!dots.length) return image;
  const columns = dots.map((i) => i % SIDE);
  const rows = dots.map((i) => Math.floor(i / SIDE));
  const [left, right, top, bottom] = [Math.min(...columns), Math.max(...columns), Math.min(...rows), Math.max(...rows)];
  const side = Math.max(right - left, bottom - top) + 1;
  const at = (place, low, high) => Math.floor((low + high + 1) / 2 + ((place + 0.5) / SIDE - 0.5) * side);
  for (let row = 0; row < SIDE; row++) {
    for (let column = 0; column < SIDE; column++) {
      const [i, j] = [at(row, top, bottom), at(column, left, right)];
      const inside = i >= 0 && i < SIDE && j >= 0 && j < SIDE;
      if (inside && field[i * SIDE + j]) image[8 * (row >> 2) + (column >> 2)] += 1 / 16;
    }
  }
  return image;
}

async function read() {
  if (page.state !== 'done') return;
  const image = new page.ort.Tensor('float32', pixels(), [1, 1, 8, 8]);
  const logits = await T.predict(page.runs[0].model, image);
  const weights = logits.map((z) => Math.exp(z - Math.max(...logits)));
  const total = weights.reduce((sum, w) => sum + w, 0);
  const drawn = field.some(Boolean);
  page.prediction = drawn ? weights.indexOf(1) : null;
  find('trainer-answer').textContent = drawn ? `${page.prediction}` : '?';
  [...find('trainer-bars').children].forEach((bar, i) => bar.style.setProperty('--share', drawn ? weights[i] / total : 0));
}

function paint() {
  const canvas = find('trainer-field');
  const c = canvas.getContext('2d');
  c.fillStyle = style('--trainer-paper');
  c.fillRect(0, 0, canvas.width, canvas.height);
  c.fillStyle = style('--trainer-text');
  const dot = canvas.width / SIDE;
  field.forEach((on, i) => on && c.fillRect((i % SIDE) * dot, Math.floor(i / SIDE) * dot, dot, dot));
}

function draw(event) {
  if (!(event.buttons || event.type === 'pointerdown')) return;
  event.preventDefault();
  const box = find('trainer-field').getBoundingClientRect();
  const [column, row] = [((event.clientX - box.left) / box.width) * SIDE, ((event.clientY - box.top) / box.height) * SIDE];
  for (let i = 0; i < SIDE * SIDE; i++) {
    if (Math.hypot((i % SIDE) + 0.5 - column, Math.floor(i / SIDE) + 0.5 - row) < 2.2) field[i] = 1;
  }
  paint();
  read();
}

const say = (text) => { find('trainer-note').textContent = text; };

find('trainer-start').addEventListener('click', () => train().catch((error) => say(`The run has failed: ${error.message}`)));
find('trainer-clear').addEventListener('click', () => { field.fill(0); paint(); read(); });
for (const kind of ['pointerdown', 'pointermove']) find('trainer-field').addEventListener(kind, draw);
new MutationObserver(() => { show(); paint(); }).observe(document.body, { attributes: true, attributeFilter: ['data-md-color-scheme'] });
addEventListener('resize', show);
paint();
load().catch((error) => say(`The page cannot train here: ${error.message}.`));
