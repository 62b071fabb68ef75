// Opens the page gpu.html in Chromium with a WebGPU adapter in software; prints what it found.

import { chromium } from 'playwright-core';

const [address, executablePath] = process.argv.slice(2);
const flags = ['--no-sandbox', '--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader', '--enable-features=Vulkan', '--use-vulkan=swiftshader'];
const browser = await chromium.launch({ executablePath, args: flags });
const page = await browser.newPage();
await page.goto(address);
await page.waitForFunction(() => globalThis.found, null, { timeout: 240000 });
process.stdout.write(JSON.stringify(await page.evaluate(() => globalThis.found)));
await browser.close();
