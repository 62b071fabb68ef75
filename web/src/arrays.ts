/** Arrays of a caller as arrays of a file: types, shapes, numbers of examples. */

import { ArrayType, Data, TrainingError, Values } from './types.js';

/** An array with the type and the shape of an input. */
export interface Typed {
  readonly type: string;
  readonly data: Data;
  readonly dims: readonly number[];
}

type Convert = (values: Iterable<unknown> & ArrayLike<unknown>) => Data;
type Kind = { readonly array: new (length: number) => Data; readonly convert: Convert };

const float = (v: unknown): number => {
  if (typeof v !== 'number') throw new TypeError(`${String(v)} is no number`);
  return v;
};
const whole = (v: unknown): bigint => {
  if (typeof v !== 'bigint' && !Number.isSafeInteger(v)) throw new TypeError(`${String(v)} is no whole number`);
  return BigInt(v as number | bigint);
};
const truth = (v: unknown): number => {
  if (v !== true && v !== false && v !== 0 && v !== 1) throw new TypeError(`${String(v)} is no truth value`);
  return Number(v);
};
const within = (values: ArrayLike<unknown>, low: number, high: number): number[] =>
  Array.from(values, (v) => {
    const number = Number(whole(v));
    if (number < low || number > high) throw new TypeError(`${number} is not in ${low} to ${high}`);
    return number;
  });

// By type of a file: the array of its values, and how numbers of other arrays are converted.
const KINDS: Readonly<Record<string, Kind>> = {
  float32: { array: Float32Array, convert: (v) => Float32Array.from(v, float) },
  float64: { array: Float64Array, convert: (v) => Float64Array.from(v, float) },
  int64: { array: BigInt64Array, convert: (v) => BigInt64Array.from(v as Iterable<bigint>, whole) },
  int32: { array: Int32Array, convert: (v) => Int32Array.from(within(v, -(2 ** 31), 2 ** 31 - 1)) },
  int16: { array: Int16Array, convert: (v) => Int16Array.from(within(v, -(2 ** 15), 2 ** 15 - 1)) },
  int8: { array: Int8Array, convert: (v) => Int8Array.from(within(v, -128, 127)) },
  uint8: { array: Uint8Array, convert: (v) => Uint8Array.from(within(v, 0, 255)) },
  bool: { array: Uint8Array, convert: (v) => Uint8Array.from(v, truth) },
};

/** Return the type of a file under the name that ONNX Runtime has for it. */
export const typeOfRuntime = (type: string): string => (type === 'object' ? 'string' : type);

const isArray = (v: unknown): v is ArrayLike<unknown> => ArrayBuffer.isView(v) || Array.isArray(v);
const product = (sizes: readonly number[]): number => sizes.reduce((a, b) => a * b, 1);

/** Return the factor and the symbol of an entry of a shape: 4 and "batch" for "4 batch". */
function parts(size: number | string): [number, string] {
  if (typeof size === 'number') return [size, ''];
  const words = size.split(' ');
  return words.length > 1 ? [Number(words[0]), words[1] ?? ''] : [1, size];
}

/** Return an array in the type and shape of an input, after checks. */
export function typed(name: string, expected: ArrayType, values: Values): Typed {
  const given = isArray(values) ? undefined : values.dims;
  const raw: unknown = isArray(values) ? values : values?.data;
  const spelled = (): string => `${expected.type} ${expected.shape.join(' × ') || 'number'}`;
  if (!isArray(raw)) throw new TrainingError(`'${name}' is no array; give one of ${spelled()}.`);
  const dims = given ?? inferred(name, expected, raw.length);
  const fits = dims.length === expected.shape.length
    && expected.shape.every((size, axis) => typeof size === 'string' || size === dims[axis]);
  if (!fits || product(dims) !== raw.length) {
    throw new TrainingError(`'${name}' has the shape ${dims.join(' × ')} and ${raw.length} entries, the files need ${spelled()}.`);
  }
  return { type: expected.type, data: converted(name, expected, raw), dims };
}

function converted(name: string, expected: ArrayType, raw: ArrayLike<unknown>): Data {
  const kind = KINDS[expected.type];
  if (expected.type === 'bool' ? isTruths(raw) : kind && raw instanceof kind.array) return raw as unknown as Data;
  if (!kind) return raw as unknown as Data; // texts and halves: the runtime checks them
  try {
    return kind.convert(raw as ArrayLike<unknown> & Iterable<unknown>);
  } catch (error) {
    throw new TrainingError(`'${name}' cannot be ${expected.type}: ${(error as Error).message}.`);
  }
}

const isTruths = (raw: ArrayLike<unknown>): boolean => raw instanceof Uint8Array && raw.every((v) => v < 2);

/** Return the shape of an array from its number of entries. */
function inferred(name: string, expected: ArrayType, length: number): readonly number[] {
  const sizes = expected.shape.map(parts);
  const symbols = sizes.filter(([, symbol]) => symbol).length;
  const fixed = product(sizes.map(([size]) => size));
  const count = symbols ? Math.round((length / fixed) ** (1 / symbols)) : 1;
  if (fixed * count ** symbols !== length) {
    const shape = expected.shape.join(' × ') || 'number';
    throw new TrainingError(`'${name}' has ${length} entries, which is no multiple of ${fixed}; the files need ${shape}.`);
  }
  return sizes.map(([size, symbol]) => (symbol ? size * count : size));
}

/** Return the number of examples of each symbol in arrays; different numbers are refused. */
export function counts(arrays: Readonly<Record<string, Typed>>, types: Readonly<Record<string, ArrayType>>): Map<string, number> {
  const known = new Map<string, [number, string]>();
  for (const [name, { dims }] of Object.entries(arrays)) {
    types[name]?.shape.forEach((size, axis) => {
      const [factor, symbol] = parts(size);
      if (!symbol) return;
      const count = (dims[axis] ?? 0) / factor;
      const [first, source] = known.get(symbol) ?? [count, name];
      if (count !== first) {
        throw new TrainingError(`'${source}' has ${first} examples and '${name}' has ${count}; give as many of each.`);
      }
      if (count === 0) throw new TrainingError(`'${name}' has no example; give one at least.`);
      known.set(symbol, [count, name]);
    });
  }
  return new Map([...known].map(([symbol, [count]]) => [symbol, count]));
}

/** Return an array of ones in the shape of an input. */
export function ones(expected: ArrayType, sizes: ReadonlyMap<string, number>): Typed {
  const dims = expected.shape.map((size) => {
    const [factor, symbol] = parts(size);
    return symbol ? factor * (sizes.get(symbol) ?? 1) : factor;
  });
  const values = new Array<number>(product(dims)).fill(1);
  return { type: expected.type, data: converted('', expected, values), dims };
}

/** Return the examples with some numbers, of an array that has them along an axis. */
export function rows(array: Typed, axis: number, numbers: ArrayLike<number>): Typed {
  const { dims, data } = array;
  const inner = product(dims.slice(axis + 1));
  const outer = product(dims.slice(0, axis));
  const size = dims[axis] ?? 0;
  const length = outer * numbers.length * inner;
  const texts: string[] = [];
  const taken = Array.isArray(data) ? texts : new (data.constructor as new (n: number) => Float32Array)(length);
  for (let o = 0, place = 0; o < outer; o++) {
    for (let i = 0; i < numbers.length; i++, place += inner) {
      const start = (o * size + (numbers[i] as number)) * inner;
      if (taken === texts) texts.push(...(data as readonly string[]).slice(start, start + inner));
      else (taken as Float32Array).set((data as Float32Array).subarray(start, start + inner), place);
    }
  }
  const shape = [...dims];
  shape[axis] = numbers.length;
  return { type: array.type, data: taken, dims: shape };
}
