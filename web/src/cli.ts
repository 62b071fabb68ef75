#!/usr/bin/env node
/** `kfac-engine-types FOLDER [NAME]` prints the types of training files. */

import { readFile } from 'node:fs/promises';
import { join } from 'node:path';

import { describe } from './description.js';
import { signature } from './signature.js';

const [folder, name = 'Files'] = process.argv.slice(2);
try {
  if (!folder || !/^[A-Za-z_]\w*$/.test(name)) throw new Error('usage: kfac-engine-types FOLDER [NAME]');
  const path = join(folder, 'training.onnx');
  process.stdout.write(signature(describe(await readFile(path), path), name));
} catch (error) {
  process.stderr.write(`error: ${(error as Error).message}\n`);
  process.exitCode = 2;
}
