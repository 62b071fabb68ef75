// Opens the page gpu.html in Chromium with a WebGPU adapter in software; prints what it found.

import { chromium } from 'playwright-core';

const [address, executablePath] = process.argv.slice(2);
const flags = ['--no-sandbox', '--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader', '--enable-features=Vulkan', '--use-vulkan=swiftshader'];
const browser = await chromium.launch({ executablePath, args: flags });
const page = await browser.newPage();
await page.goto(address);
// An adapter in software compiles each of the 150 shaders of a K-FAC step for half a second, at its first use.
const ended = page.waitForFunction(() => globalThis.found, null, { timeout: 1_200_000 });
const found = await ended.then((value) => value.jsonValue(), async () => ({ adapter: true, error: `no end after 20 minutes: ${await page.evaluate(() => globalThis.stage)}` }));
process.stdout.write(JSON.stringify(found));
await browser.close();
