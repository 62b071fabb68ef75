// Opens the page in Chromium, trains, draws a digit, and prints what happened as JSON.
// node drive.mjs URL CHROMIUM FOLDER: pictures of the page are written into the folder.

import { chromium } from 'playwright-core';

const [address, executablePath, folder] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ['--no-sandbox'] });
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
await page.waitForFunction(() => globalThis.trainer?.state === 'ready', null, { timeout: 120000 });
await context.setOffline(true); // the page needs no network any more
const before = requests.length;
await page.click('#trainer-start');
await page.waitForFunction(() => globalThis.trainer.state === 'done', null, { timeout: 240000 });

// A one: a stroke from the top to the bottom.
const box = await page.locator('#trainer-field').boundingBox();
await page.mouse.move(box.x + box.width * 0.5, box.y + box.height * 0.15);
await page.mouse.down();
await page.mouse.move(box.x + box.width * 0.5, box.y + box.height * 0.85, { steps: 30 });
await page.mouse.up();
await page.waitForTimeout(300);

const results = await page.evaluate(() => ({
  prediction: globalThis.trainer.prediction,
  runs: globalThis.trainer.runs.map((run) => ({
    name: run.name,
    losses: run.model.losses,
    created: run.created,
    milliseconds: run.model.milliseconds,
    numbers: run.numbers,
    points: run.points,
    weights: Object.fromEntries(
      run.model.predict.inputNames
        .filter((name) => name in run.model.state)
        .map((name) => [name, Array.from(run.model.state[name].data)]),
    ),
  })),
}));
const sizes = [['desktop', 1280, 1000], ['phone', 390, 844]];
for (const [name, width, height] of folder ? sizes : []) {
  await page.setViewportSize({ width, height });
  for (const scheme of ['default', 'slate']) {
    await page.evaluate((s) => document.body.setAttribute('data-md-color-scheme', s), scheme);
    await page.waitForTimeout(300);
    await page.locator('#trainer').scrollIntoViewIfNeeded();
    await page.screenshot({ path: `${folder}/${name}-${scheme === 'slate' ? 'dark' : 'light'}.png` });
  }
}
const overflow = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
await browser.close();
const origin = new URL(address).origin;
process.stdout.write(JSON.stringify({
  ...results, faults, overflow,
  later: requests.slice(before), // none
  elsewhere: requests.filter((request) => !/^(data|blob):|^https:\/\/api\.github\.com\//.test(request) && !request.startsWith(origin)),
}));
