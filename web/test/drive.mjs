// Opens the page in Chromium, trains, draws, uses a worker, and prints what happened as JSON.
// node drive.mjs URL CHROMIUM FOLDER: pictures of the page are written into the folder.

import { chromium } from 'playwright-core';

const [address, executablePath, folder] = process.argv.slice(2);
const args = ['--no-sandbox', '--use-fake-device-for-media-stream', '--use-fake-ui-for-media-stream'];
const browser = await chromium.launch({ executablePath, args });
const context = await browser.newContext({ viewport: { width: 1280, height: 1000 }, colorScheme: 'light' });
// The theme asks GitHub for the number of stars, on every page of a site whose source is there.
await context.route('https://api.github.com/**', (route) => route.fulfill({ json: {} }));
const page = await context.newPage();
const faults = [];
const requests = [];
page.on('console', (message) => message.type() === 'error' && faults.push(message.text()));
page.on('pageerror', (error) => faults.push(String(error)));
page.on('request', (request) => requests.push(request.url()));

await page.goto(address);
await page.waitForFunction(() => globalThis.trainer?.state === 'ready', null, { timeout: 240000 });

// A state in the IndexedDB, and a worker, as a page of another developer has them.
const package_ = await page.evaluate(async () => {
  const { Trainer, forget } = globalThis.trainer.package;
  const url = (path) => new URL(`../browser/${path}`, location).href;
  const runtime = url('ort/ort.wasm.min.mjs');
  const options = { runtime, wasm: { numThreads: 1 } };
  const worker = new Worker(url('kfac-engine-worker.min.js'), { type: 'module' });
  const there = await Trainer.load(url('digits/adamw/'), { ...options, worker });
  const here = await Trainer.load(url('digits/adamw/'), options);
  const losses = [];
  for (const trainer of [here, there]) {
    for await (const { loss } of trainer.fit(trainer.batches(globalThis.trainer.train, { seed: 5 }), { steps: 5 })) losses.push(loss);
  }
  await there.save('a state');
  const again = await Trainer.resume(url('digits/adamw/'), 'a state', options);
  const equal = async (one, other) => [await one.save(), await other.save()].map(String).every((text, _, [first]) => text === first);
  const resumed = await equal(again, there);
  await forget('a state');
  const missing = await Trainer.resume(url('digits/adamw/'), 'a state', options).catch((error) => `${error.name}: ${error.message}`);
  const broken = await there.predict({}).catch((error) => `${error.name}: ${error.message}`);
  await there.release();
  worker.terminate();
  return { losses, resumed, steps: await again.steps(), missing, broken };
});

await context.setOffline(true); // the page needs no network any more
const before = requests.length;
await page.click('#digits-start');
await page.waitForFunction(() => globalThis.trainer.state === 'done', null, { timeout: 240000 });

async function stroke(field, from, to) {
  await page.locator(field).scrollIntoViewIfNeeded();
  const box = await page.locator(field).boundingBox();
  await page.mouse.move(box.x + box.width * from[0], box.y + box.height * from[1]);
  await page.mouse.down();
  await page.mouse.move(box.x + box.width * to[0], box.y + box.height * to[1], { steps: 30 });
  await page.mouse.up();
}
// A one: a stroke from the top to the bottom.
await stroke('#digits-field', [0.5, 0.15], [0.5, 0.85]);
await page.waitForTimeout(300);

// Two classes: strokes that stand, and strokes that lie.
const standing = (x) => stroke('#pictures-field', [x, 0.1], [x, 0.9]);
const lying = (y) => stroke('#pictures-field', [0.1, y], [0.9, y]);
for (const [label, draw] of [standing, lying].entries()) {
  for (const place of [0.35, 0.45, 0.55, 0.65]) {
    await draw(place);
    await page.locator('[data-class] .trainer-add').nth(label).click();
  }
}
await page.click('#pictures-start');
await page.waitForFunction(() => globalThis.trainer.trained, null, { timeout: 240000 });
const answers = [];
for (const draw of [standing, lying]) {
  await draw(0.5);
  await page.waitForTimeout(300);
  answers.push(await page.evaluate(() => globalThis.trainer.answers));
  await page.click('#pictures-clear');
}
// A photograph with the camera, which this Chromium imitates, and one from a file.
await page.click('#pictures-eye');
await page.waitForFunction(() => document.querySelector('#pictures-camera').videoWidth > 0);
await page.locator('[data-class] .trainer-add').nth(2).click();
await page.click('#pictures-eye');
const file = await page.locator('#digits-curves').screenshot();
await page.locator('input[type=file]').nth(2).setInputFiles({ name: 'a.png', mimeType: 'image/png', buffer: file });
await page.waitForFunction(() => globalThis.trainer.examples.length === 10);
const photographs = await page.evaluate(() => globalThis.trainer.examples.slice(8).map(({ image, label }) => ({
  label, size: image.length, least: Math.min(...image), most: Math.max(...image), different: new Set(image).size,
})));

const results = await page.evaluate(async () => ({
  prediction: globalThis.trainer.prediction,
  numbers: globalThis.trainer.numbers,
  pictures: globalThis.trainer.races.pictures.runs.map(({ name, losses, points }) => ({ name, losses, last: points.at(-1) })),
  runs: await Promise.all(globalThis.trainer.races.digits.runs.map(async ({ name, losses, created, milliseconds, points, trainer }) => ({
    name, losses, created, milliseconds, points, state: btoa((await trainer.save()).reduce((text, byte) => text + String.fromCharCode(byte), '')),
  }))),
}));
const sizes = [['desktop', 1280, 1000], ['phone', 390, 844]];
for (const [name, width, height] of folder ? sizes : []) {
  await page.setViewportSize({ width, height });
  for (const scheme of ['default', 'slate']) {
    await page.evaluate((s) => document.body.setAttribute('data-md-color-scheme', s), scheme);
    await page.waitForTimeout(300);
    await page.locator('#trainer').scrollIntoViewIfNeeded();
    await page.screenshot({ path: `${folder}/${name}-${scheme === 'slate' ? 'dark' : 'light'}.png`, fullPage: true });
  }
}
const overflow = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
await browser.close();
const origin = new URL(address).origin;
process.stdout.write(JSON.stringify({
  ...results, package: package_, answers, photographs, faults, overflow,
  later: requests.slice(before).filter((request) => !/^(data|blob):/.test(request)), // none
  elsewhere: requests.filter((request) => !/^(data|blob):|^https:\/\/api\.github\.com\//.test(request) && !request.startsWith(origin)),
}));
