// The page "Train in your browser": races of two optimizers, on digits and on pictures of a visitor.

const find = (id) => document.getElementById(id);
const url = (path) => new URL(path, import.meta.url).href;
const page = { state: 'loading', races: {} };
globalThis.trainer = page; // for tests, and for the curious

const RUNS = [
  { name: 'kfac', label: 'K-FAC', variable: '--run-first' },
  { name: 'adamw', label: 'AdamW', variable: '--run-second' },
];
const OPTIONS = { runtime: url('ort/ort.wasm.min.mjs'), wasm: { numThreads: 1 } };
const falling = (done) => Math.min(1, (1 - done) / 0.4);

// -- races -------------------------------------------------------------------------------------------

// Two runs that train in turns: the run that has used less time takes the next step, so that both
// curves have the same clock. `curve(run, record)` returns the next points of a run's curve.
class Race {
  constructor(name, steps, curve) {
    Object.assign(this, { name, curve });
    this.runs = RUNS.map((run) => ({ ...run, steps: steps[run.name], points: [], losses: [], milliseconds: 0 }));
  }

  async load(warmUp) {
    const { Trainer } = page.package;
    for (const run of this.runs) {
      const start = performance.now();
      run.trainer = await Trainer.load(url(`${this.name}/${run.name}/`), OPTIONS);
      run.created = performance.now() - start;
      run.first = await run.trainer.save();
      // The browser compiles what runs first: two steps whose results are dropped.
      for await (const _ of run.trainer.fit([warmUp, warmUp])); // eslint-disable-line no-unused-vars
    }
  }

  async train(batchesOf) {
    for (const run of this.runs) {
      await run.trainer.restore(run.first);
      Object.assign(run, { points: [], losses: [], milliseconds: 0, done: false });
      run.records = run.trainer.fit(batchesOf(run), { steps: run.steps, rate: (step) => falling(step / run.steps) });
      run.points.push(...(await this.curve(run, null)));
    }
    for (let open = this.runs; open.length; open = this.runs.filter((run) => !run.done)) {
      const run = open.reduce((a, b) => (b.milliseconds < a.milliseconds ? b : a));
      const { value, done } = await run.records.next();
      run.done = done || run.losses.length + 1 === run.steps;
      if (done) continue;
      run.milliseconds += value.milliseconds;
      run.losses.push(value.loss);
      run.points.push(...(await this.curve(run, value)));
      this.show();
    }
  }

  show() {
    curves(find(`${this.name}-curves`), this.runs);
    for (const run of this.runs) {
      const last = run.points.at(-1);
      if (!last) continue;
      const cells = [run.label, `${run.losses.length}`, `${(run.milliseconds / 1e3).toFixed(2)} s`, last.loss.toFixed(3), `${(100 * last.accuracy).toFixed(1)} %`];
      [...find(`${this.name}-${run.name}`).cells].forEach((cell, i) => { cell.textContent = cells[i]; });
    }
  }
}

const style = (name) => getComputedStyle(find('trainer')).getPropertyValue(name);

function curves(canvas, runs) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const c = canvas.getContext('2d');
  c.scale(ratio, ratio);
  const far = Math.max(1, ...runs.flatMap((run) => run.points.map((p) => p.seconds)));
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
  for (const run of runs) {
    c.strokeStyle = style(run.variable);
    c.beginPath();
    run.points.forEach((p, i) => c[i ? 'lineTo' : 'moveTo'](x(p.seconds), y(p.loss)));
    c.stroke();
  }
}

// -- fields to draw in -------------------------------------------------------------------------------

const SIDE = 32;

class Field {
  constructor(id, changed) {
    Object.assign(this, { canvas: find(id), changed, dots: new Uint8Array(SIDE * SIDE) });
    for (const kind of ['pointerdown', 'pointermove']) this.canvas.addEventListener(kind, (event) => this.draw(event));
    this.paint();
  }

  clear() {
    this.dots.fill(0);
    this.paint();
    this.changed();
  }

  paint() {
    const c = this.canvas.getContext('2d');
    c.fillStyle = style('--trainer-paper');
    c.fillRect(0, 0, this.canvas.width, this.canvas.height);
    c.fillStyle = style('--trainer-text');
    const dot = this.canvas.width / SIDE;
    this.dots.forEach((on, i) => on && c.fillRect((i % SIDE) * dot, Math.floor(i / SIDE) * dot, dot, dot));
  }

  draw(event) {
    if (!(event.buttons || event.type === 'pointerdown')) return;
    event.preventDefault();
    const box = this.canvas.getBoundingClientRect();
    const [column, row] = [((event.clientX - box.left) / box.width) * SIDE, ((event.clientY - box.top) / box.height) * SIDE];
    for (let i = 0; i < SIDE * SIDE; i++) {
      if (Math.hypot((i % SIDE) + 0.5 - column, Math.floor(i / SIDE) + 0.5 - row) < 2.2) this.dots[i] = 1;
    }
    this.paint();
    this.changed();
  }
}

function probabilities(logits) {
  const weights = [...logits].map((z) => Math.exp(z - Math.max(...logits)));
  const total = weights.reduce((sum, w) => sum + w, 0);
  return weights.map((w) => w / total);
}

const bars = (element, shares) => [...element.children].forEach((bar, i) => bar.style.setProperty('--share', shares[i] ?? 0));

// -- digits ------------------------------------------------------------------------------------------

const BATCH = 128;
const EVERY = 6;
const digits = new Race('digits', { kfac: 110, adamw: 220 }, async (run, record) => {
  const done = run.losses.length;
  if (record && done % EVERY && done !== run.steps) return [];
  const metrics = await run.trainer.evaluate([page.heldOut]);
  return [{ seconds: run.milliseconds / 1e3, ...metrics }];
});
page.races.digits = digits;

/** Read the digits: the number of those to train on, images of 64 bytes from 0 to 16, and labels. */
function readDigits(bytes) {
  const [count, train] = new Uint32Array(bytes.slice(0, 8).buffer);
  const image = Float32Array.from(bytes.subarray(8, 8 + 64 * count), (pixel) => pixel / 16);
  const targets = bytes.subarray(8 + 64 * count);
  page.train = { image: image.subarray(0, 64 * train), targets: targets.subarray(0, train) };
  page.heldOut = { image: image.subarray(64 * train), targets: targets.subarray(train) };
}

async function trainDigits() {
  find('digits-start').disabled = true;
  page.state = 'training';
  const options = { size: BATCH, epochs: 30, seed: 1 };
  page.numbers = [...page.package.order(page.train.targets.length, options)].map((numbers) => [...numbers]);
  await digits.train((run) => run.trainer.batches(page.train, options));
  page.state = 'done';
  say('digits', 'Draw a digit below: the network that K-FAC trained reads it.');
  find('digits-start').disabled = false;
  await readDigit();
}

// As in the data: the digit fills a square of 32 × 32 dots, and a pixel counts the dots of 4 × 4.
function pixels(field) {
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

const digitField = new Field('digits-field', () => readDigit());

async function readDigit() {
  if (page.state !== 'done') return;
  const { logits } = await digits.runs[0].trainer.predict({ image: pixels(digitField.dots) });
  const drawn = digitField.dots.some(Boolean);
  const shares = probabilities(logits.data);
  page.prediction = drawn ? shares.indexOf(Math.max(...shares)) : null;
  find('digits-answer').textContent = drawn ? `${page.prediction}` : '?';
  bars(find('digits-bars'), drawn ? shares : []);
}

// -- pictures of the visitor -------------------------------------------------------------------------

const PIXELS = SIDE * SIDE;
const PICTURES = 24; // in a batch
const names = [...document.querySelectorAll('#pictures-classes [data-class]')];
const examples = []; // { image, label }
page.examples = examples;

const pictures = new Race('pictures', { kfac: 100, adamw: 200 }, async (run, record) => {
  if (!record) return [];
  const before = run.points.at(-1) ?? record;
  const mean = (metric) => 0.9 * before[metric] + 0.1 * record[metric]; // of the last steps
  return [{ seconds: run.milliseconds / 1e3, loss: mean('loss'), accuracy: mean('accuracy') }];
});
page.races.pictures = pictures;

// Batches without an end: pictures of all classes, moved, turned, scaled, lighter or darker.
function* moved(random) {
  const labels = [...new Set(examples.map(({ label }) => label))];
  for (;;) {
    const image = new Float32Array(PICTURES * 3 * PIXELS);
    const targets = Array.from({ length: PICTURES }, (_, i) => {
      const label = labels[i % labels.length];
      const same = examples.filter((example) => example.label === label);
      move(same[Math.floor(random() * same.length)].image, image.subarray(i * 3 * PIXELS, (i + 1) * 3 * PIXELS), random);
      return label;
    });
    yield { image, targets };
  }
}

function move(source, target, random) {
  const between = (low, high) => low + (high - low) * random();
  const [angle, scale, right, down, light] = [between(-0.25, 0.25), between(0.85, 1.15), between(-3, 3), between(-3, 3), between(0.8, 1.2)];
  const [cos, sin] = [Math.cos(angle) / scale, Math.sin(angle) / scale];
  const middle = (SIDE - 1) / 2;
  const inside = (place) => Math.min(SIDE - 1, Math.max(0, Math.round(place)));
  for (let row = 0; row < SIDE; row++) {
    for (let column = 0; column < SIDE; column++) {
      const [x, y] = [column - middle - right, row - middle - down];
      const from = inside(middle + sin * x + cos * y) * SIDE + inside(middle + cos * x - sin * y);
      for (let c = 0; c < 3; c++) target[c * PIXELS + row * SIDE + column] = light * source[c * PIXELS + from];
    }
  }
}

function randomOf(seed) {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

async function trainPictures() {
  if (new Set(examples.map(({ label }) => label)).size < 2) {
    say('pictures', 'Draw or photograph examples of two classes at least.');
    return;
  }
  find('pictures-start').disabled = true;
  say('pictures', 'Both runs get the same pictures, moved and turned anew in each batch.');
  await pictures.train(() => Object.assign(moved(randomOf(1)), { examples: examples.length }));
  page.trained = true;
  say('pictures', 'Draw something, or hold it before the camera: both networks say what it is.');
  find('pictures-start').disabled = false;
  await look();
}

const drawing = () => {
  const image = new Float32Array(3 * PIXELS);
  for (let i = 0; i < 3 * PIXELS; i++) image[i] = pictureField.dots[i % PIXELS];
  return image;
};

// The middle square of a picture or of a frame of the camera.
function photograph(source, width, height) {
  const canvas = Object.assign(document.createElement('canvas'), { width: SIDE, height: SIDE });
  const side = Math.min(width, height);
  const c = canvas.getContext('2d', { willReadFrequently: true });
  c.drawImage(source, (width - side) / 2, (height - side) / 2, side, side, 0, 0, SIDE, SIDE);
  const { data } = c.getImageData(0, 0, SIDE, SIDE);
  return Float32Array.from({ length: 3 * PIXELS }, (_, i) => data[4 * (i % PIXELS) + Math.floor(i / PIXELS)] / 255);
}

const video = find('pictures-camera');
const frame = () => photograph(video, video.videoWidth, video.videoHeight);
const looking = () => Boolean(video.srcObject);

function add(image, label) {
  examples.push({ image, label });
  const picture = Object.assign(document.createElement('canvas'), { width: SIDE, height: SIDE });
  const c = picture.getContext('2d');
  const pixel = c.createImageData(SIDE, SIDE);
  for (let i = 0; i < PIXELS; i++) for (let k = 0; k < 4; k++) pixel.data[4 * i + k] = k < 3 ? 255 * image[k * PIXELS + i] : 255;
  c.putImageData(pixel, 0, 0);
  names[label].querySelector('.trainer-examples').append(picture);
  find('pictures-start').disabled = false;
}

const pictureField = new Field('pictures-field', () => look());

async function look() {
  if (!page.trained) return;
  const image = looking() ? frame() : drawing();
  page.answers = {};
  for (const run of pictures.runs) {
    const { logits } = await run.trainer.predict({ image });
    const shares = probabilities(logits.data);
    page.answers[run.name] = shares.indexOf(Math.max(...shares));
    bars(find(`pictures-bars-${run.name}`), shares);
  }
}

async function camera() {
  if (looking()) {
    for (const track of video.srcObject.getTracks()) track.stop();
    video.srcObject = null;
  } else {
    video.srcObject = await navigator.mediaDevices.getUserMedia({ video: { facingMode: 'environment' } });
    await video.play();
    const watch = async () => {
      if (!looking()) return;
      if (!find('pictures-start').disabled) await look();
      setTimeout(watch, 200);
    };
    watch();
  }
  video.hidden = !looking();
  find('pictures-field').hidden = looking();
  find('pictures-eye').textContent = looking() ? 'Draw' : 'Camera';
}

names.forEach((row, label) => {
  row.querySelector('input[type=text]').addEventListener('input', ({ target }) => {
    for (const run of RUNS) find(`pictures-bars-${run.name}`).children[label].dataset.digit = target.value;
  });
  row.querySelector('.trainer-add').addEventListener('click', () => {
    if (looking()) add(frame(), label);
    else if (pictureField.dots.some(Boolean)) {
      add(drawing(), label);
      pictureField.clear();
    }
  });
  row.querySelector('input[type=file]').addEventListener('change', async ({ target }) => {
    for (const file of target.files) {
      const picture = await createImageBitmap(file);
      add(photograph(picture, picture.width, picture.height), label);
    }
    target.value = '';
  });
});

// -- the page ----------------------------------------------------------------------------------------

const say = (part, text) => { find(`${part}-note`).textContent = text; };
const failed = (part) => (error) => say(part, `This has failed: ${error.message}`);

async function load() {
  const [module, response] = await Promise.all([import(url('kfac-engine.min.js')), fetch(url('digits.bin'))]);
  page.package = module;
  readDigits(new Uint8Array(await response.arrayBuffer()));
  const { image, targets } = page.train;
  await digits.load({ image: image.subarray(0, 64 * BATCH), targets: targets.subarray(0, BATCH) });
  await pictures.load({ image: new Float32Array(PICTURES * 3 * PIXELS), targets: new Uint8Array(PICTURES) });
  page.state = 'ready';
  say('digits', 'Everything is on this device now; the network is not needed any more.');
  find('digits-start').disabled = false;
}

find('digits-start').addEventListener('click', () => trainDigits().catch(failed('digits')));
find('digits-clear').addEventListener('click', () => digitField.clear());
find('pictures-start').addEventListener('click', () => trainPictures().catch(failed('pictures')));
find('pictures-clear').addEventListener('click', () => pictureField.clear());
find('pictures-eye').addEventListener('click', () => camera().catch(failed('pictures')));
const redraw = () => {
  for (const race of Object.values(page.races)) race.show();
  for (const field of [digitField, pictureField]) field.paint();
};
new MutationObserver(redraw).observe(document.body, { attributes: true, attributeFilter: ['data-md-color-scheme'] });
addEventListener('resize', redraw);
load().catch((error) => say('digits', `The page cannot train here: ${error.message}.`));
