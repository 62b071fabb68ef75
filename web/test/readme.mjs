// Opens a page in Chromium until its title is a number; prints the title and faults as JSON.
// node readme.mjs URL CHROMIUM

import { chromium } from 'playwright-core';

const [address, executablePath] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ['--no-sandbox'] });
const page = await browser.newPage();
const faults = [];
page.on('pageerror', (error) => faults.push(String(error)));
await page.goto(address);
await page.waitForFunction(() => Number(document.title) > 0, null, { timeout: 120000 }).catch((error) => faults.push(String(error)));
process.stdout.write(JSON.stringify({ title: await page.title(), faults }));
await browser.close();
