/** ONNX Runtime and files in a browser. */

import { Runtime, TrainingError } from './types.js';

/** Return the runtime of a browser, which the peer package onnxruntime-web has. */
export const defaultRuntime = async (): Promise<Runtime> => (await import('onnxruntime-web')) as Runtime;

/** Return the address of a file in a folder. */
export function addressOf(folder: string | URL, name: string): string {
  const base = new URL(String(folder), globalThis.location?.href);
  if (!base.pathname.endsWith('/')) base.pathname += '/';
  return new URL(name, base).href;
}

/** Return the bytes at an address, and report how many have come. */
export async function read(address: string, signal?: AbortSignal, came?: (bytes: number) => void): Promise<Uint8Array> {
  const response = await fetch(address, signal ? { signal } : {});
  if (!response.ok || !response.body) {
    throw new TrainingError(`cannot read '${address}': status ${response.status}; is it a folder of kfac_engine.export_training?`);
  }
  const chunks: Uint8Array[] = [];
  let length = 0;
  const reader = response.body.getReader();
  for (let next = await reader.read(); !next.done; next = await reader.read()) {
    chunks.push(next.value);
    length += next.value.length;
    came?.(next.value.length);
  }
  const bytes = new Uint8Array(length);
  let place = 0;
  for (const chunk of chunks) {
    bytes.set(chunk, place);
    place += chunk.length;
  }
  return bytes;
}
