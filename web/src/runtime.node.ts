/** ONNX Runtime and files in Node. */

import { readFile } from 'node:fs/promises';
import { pathToFileURL } from 'node:url';

import { read as fetched } from './runtime.js';
import { Runtime, TrainingError } from './types.js';

const PACKAGES = ['onnxruntime-node', 'onnxruntime-web'];

/** Return the first peer package that is installed. */
export async function defaultRuntime(): Promise<Runtime> {
  for (const name of PACKAGES) {
    try {
      return (await import(name)) as Runtime;
    } catch (error) {
      if ((error as { code?: string }).code !== 'ERR_MODULE_NOT_FOUND') throw error;
    }
  }
  throw new TrainingError(`no ONNX Runtime is installed; run npm install ${PACKAGES[0]} or ${PACKAGES[1]}.`);
}

/** Return the address of a file in a folder, which is a path or a URL. */
export function addressOf(folder: string | URL, name: string): string {
  const isAddress = /^[a-z][a-z0-9+.-]+:/i.test(String(folder));
  const base = isAddress ? new URL(String(folder)) : pathToFileURL(String(folder));
  if (!base.pathname.endsWith('/')) base.pathname += '/';
  return new URL(name, base).href;
}

/** Return the bytes at an address, and report how many have come. */
export async function read(address: string, signal?: AbortSignal, came?: (bytes: number) => void): Promise<Uint8Array> {
  if (!address.startsWith('file:')) return fetched(address, signal, came);
  try {
    const bytes = new Uint8Array(await readFile(new URL(address), signal ? { signal } : {}));
    came?.(bytes.length);
    return bytes;
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new TrainingError(`cannot read '${address}': ${(error as Error).message}; is it a folder of kfac_engine.export_training?`);
  }
}
