/** Reads and writes safetensors files: https://huggingface.co/docs/safetensors. */

import { Typed } from './arrays.js';
import { Data, TrainingError } from './types.js';

type Numeric = Exclude<Data, readonly string[]>;
type Kind = readonly [string, { new (buffer: ArrayBuffer): Numeric; readonly BYTES_PER_ELEMENT: number }];

// By type in a file of this library: the type in a safetensors file, and the array of its numbers.
const KINDS: Readonly<Record<string, Kind>> = {
  float32: ['F32', Float32Array], float64: ['F64', Float64Array], int64: ['I64', BigInt64Array],
  int32: ['I32', Int32Array], int16: ['I16', Int16Array], int8: ['I8', Int8Array],
  uint8: ['U8', Uint8Array], bool: ['BOOL', Uint8Array],
};
const LENGTH_BYTES = 8;

/** Return the bytes of a file with arrays by name and texts by name. */
export function written(arrays: Readonly<Record<string, Typed>>, metadata: Readonly<Record<string, string>>): Uint8Array<ArrayBuffer> {
  const header: Record<string, unknown> = { __metadata__: metadata };
  let offset = 0;
  for (const [name, { type, data, dims }] of Object.entries(arrays)) {
    const end = offset + (data as Numeric).byteLength;
    header[name] = { dtype: KINDS[type]?.[0], shape: dims, data_offsets: [offset, end] };
    offset = end;
  }
  let text = JSON.stringify(header);
  const encoded = new TextEncoder();
  text += ' '.repeat((LENGTH_BYTES - (encoded.encode(text).length % LENGTH_BYTES)) % LENGTH_BYTES); // arrays lie aligned
  const head = encoded.encode(text);
  const bytes = new Uint8Array(LENGTH_BYTES + head.length + offset);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(head.length), true);
  bytes.set(head, LENGTH_BYTES);
  let place = LENGTH_BYTES + head.length;
  for (const { data } of Object.values(arrays)) {
    const view = data as Numeric;
    bytes.set(new Uint8Array(view.buffer, view.byteOffset, view.byteLength), place);
    place += view.byteLength;
  }
  return bytes;
}

/** Return the arrays and the texts of a file. */
export function read(bytes: Uint8Array): [Record<string, Typed>, Record<string, string>] {
  const damaged = (reason: string): never => {
    throw new TrainingError(`the saved state is damaged: ${reason}; use another.`);
  };
  if (bytes.length < LENGTH_BYTES) damaged('it has no header');
  const length = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  const start = LENGTH_BYTES + length;
  if (start > bytes.length) damaged('its header is longer than the file');
  let header: Record<string, { dtype: string; shape: number[]; data_offsets: [number, number] }> = {};
  try {
    header = JSON.parse(new TextDecoder().decode(bytes.subarray(LENGTH_BYTES, start)));
  } catch {
    damaged('its header is no JSON');
  }
  const { __metadata__: metadata, ...entries } = header;
  const arrays: Record<string, Typed> = {};
  for (const [name, entry] of Object.entries(entries)) {
    const [type, [, array]] = Object.entries(KINDS).find(([, [dtype]]) => dtype === entry?.dtype)
      ?? damaged(`'${name}' has the type ${String(entry?.dtype)}`);
    const shape: unknown = entry.shape;
    const sizes = Array.isArray(shape) && shape.every((size) => Number.isSafeInteger(size) && size >= 0)
      ? (shape as number[]) : damaged(`'${name}' has no shape`);
    const [from, to] = (Array.isArray(entry.data_offsets) ? entry.data_offsets : damaged(`'${name}' has no place`)) as [number, number];
    const size = sizes.reduce((a, b) => a * b, array.BYTES_PER_ELEMENT);
    if (!(from >= 0) || to - from !== size || start + to > bytes.length) damaged(`'${name}' has the wrong size`);
    const data = new array(Uint8Array.prototype.slice.call(bytes, start + from, start + to).buffer);
    arrays[name] = { type, data, dims: sizes };
  }
  return [arrays, (metadata ?? {}) as unknown as Record<string, string>];
}
