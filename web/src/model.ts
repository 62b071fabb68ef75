/** The files of one export: their sessions, and the state. */

import { counts, ones, typed, Typed, typeOfRuntime } from './arrays.js';
import { describe } from './description.js';
import { read as readTensors, written } from './safetensors.js';
import { addressOf, defaultRuntime, read } from '#runtime';
import { ArrayType, Data, Description, Result, Runtime, Session, Tensor, TrainingError, Values } from './types.js';

export type Arrays = Readonly<Record<string, Values>>;
export type Results = Record<string, Result>;

/** What a step measured: the number of steps before it, metrics, and whether it changed the state. */
export interface Measured {
  step: number;
  finite: boolean;
  milliseconds: number;
  metrics: Record<string, number>;
}

/** Sums of metrics and what divides them, by output of `evaluate.onnx`. */
export type Sums = Record<string, number[]>;

/** What a trainer asks of its files, here or in a worker. */
export interface Model {
  readonly description: Description;
  /** Number of steps in the state. */
  steps(): Promise<number>;
  /** Take a step on a batch. */
  take(batch: Arrays, rate: number): Promise<Measured>;
  predict(inputs: Arrays): Promise<Results>;
  evaluate(batch: Arrays): Promise<Sums>;
  /** Say how many different examples there are, unless the state knows. */
  setExamples(count: number): Promise<void>;
  save(): Promise<Uint8Array<ArrayBuffer>>;
  restore(saved: Uint8Array): Promise<void>;
  release(): Promise<void>;
}

/** Options of a model that a worker can receive. */
export interface ModelOptions {
  /** ONNX Runtime, or the address of its module; by default the peer package that is installed. */
  runtime?: Runtime | string;
  /** Settings of its WebAssembly, such as `numThreads` and `wasmPaths`: `env.wasm` of the runtime. */
  wasm?: object;
  /** Options of `InferenceSession.create`, such as `executionProviders`. */
  session?: object;
}

/** Reads a file of an export by its name. */
export type Reader = (name: string) => Promise<Uint8Array>;

// The last call of each runtime.
const LAST = new WeakMap<Runtime, Promise<unknown>>();

const FILES = ['training', 'initial', 'predict', 'evaluate'] as const;
type Name = (typeof FILES)[number];

/** Return a reader of the files in a folder. */
export const readerOf = (folder: string | URL, signal?: AbortSignal, progress?: (bytes: number) => void): Reader => {
  let total = 0;
  const came = (bytes: number): void => progress?.(total += bytes);
  return (name) => read(addressOf(folder, name), signal, came);
};

/** Return the runtime of some options, with its settings. */
async function runtimeOf({ runtime, wasm }: ModelOptions): Promise<Runtime> {
  const found = typeof runtime === 'string'
    ? ((await import(/* @vite-ignore */ /* webpackIgnore: true */ runtime)) as Runtime)
    : runtime ?? (await defaultRuntime());
  const { wasm: settings } = found.env as { wasm?: object };
  if (wasm && settings) Object.assign(settings, wasm);
  return found;
}

/** A model whose sessions run in this thread. */
export class LocalModel implements Model {
  readonly description: Description;
  private readonly sessions = new Map<Name, Promise<Session>>();
  private state: Record<string, Tensor> = {};
  private released = false;
  /** The states, and the output that replaces each. */
  private readonly latest: readonly (readonly [string, string])[];
  /** The outputs that a step measures: whether it is finite, and the metrics. */
  private readonly measured: readonly string[];
  /** Number of steps in the state, once it has been read. */
  private step: number | undefined;

  private constructor(
    private readonly runtime: Runtime,
    private readonly files: Map<Name, Uint8Array>,
    private readonly options: ModelOptions,
  ) {
    const described = FILES.map((name) => describe(files.get(name) as Uint8Array, `${name}.onnx`));
    const [first] = described as [Description];
    described.forEach((other, i) => {
      if (other.identity !== first.identity) {
        throw new TrainingError(`'training.onnx' and '${FILES[i]}.onnx' belong to different exports; export the model again.`);
      }
    });
    this.description = first;
    this.latest = Object.keys(first.state).map((name) => [name, `new ${name}`]);
    this.measured = ['finite', ...first.metrics.filter((name) => name !== 'finite')];
  }

  /** Read the files of a folder, and begin with their first state. */
  static async load(reader: Reader, options: ModelOptions = {}): Promise<LocalModel> {
    const [runtime, ...contents] = await Promise.all([
      runtimeOf(options), ...FILES.map((name) => reader(`${name}.onnx`)),
    ]);
    const files = new Map(FILES.map((name, i) => [name, contents[i] as Uint8Array]));
    const model = new LocalModel(runtime, files, options);
    await model.alone(async () => {
      await model.session('training');
      const initial = await model.session('initial');
      model.state = { ...(await initial.run({})) } as Record<string, Tensor>;
      await initial.release();
    });
    return model;
  }

  steps(): Promise<number> {
    return this.alone(() => this.taken());
  }

  take(batch: Arrays, rate: number): Promise<Measured> {
    return this.alone(async () => {
      const start = performance.now();
      const feeds: Record<string, Tensor> = { ...this.state };
      for (const [name, array] of Object.entries(this.batch(batch))) feeds[name] = this.tensor(array);
      feeds['rate'] = this.tensor({ type: 'float32', data: Float32Array.of(rate), dims: [] });
      const step = await this.taken();
      const results = await this.run('training', feeds);
      for (const [name, latest] of this.latest) {
        const value = results[latest] as Tensor; // without entries, it is the old one
        if (!value.size) continue;
        const old = this.state[name] as Tensor;
        if (old.location !== 'cpu') old.dispose();
        this.state[name] = value;
      }
      const metrics: Record<string, number> = {};
      for (const name of this.measured) metrics[name] = Number((await dataOf(results[name] as Tensor))[0]);
      const { finite, ...others } = metrics;
      this.step = step + Number(finite);
      return { step, finite: Boolean(finite), milliseconds: performance.now() - start, metrics: others };
    });
  }

  predict(inputs: Arrays): Promise<Results> {
    return this.alone(async () => {
      const results = await this.predicted(inputs);
      const outputs = Object.keys(this.description.predictions).map(async (name): Promise<[string, Result]> => {
        const { dims, data } = await values(results[name] as Tensor);
        return [name, { data, dims }];
      });
      return Object.fromEntries(await Promise.all(outputs));
    });
  }

  evaluate(batch: Arrays): Promise<Sums> {
    return this.alone(async () => {
      const arrays = this.batch(batch);
      const predicted = await this.predicted(Object.fromEntries(Object.keys(this.description.inputs).map((name) => [name, arrays[name] as Values])));
      const feeds: Record<string, Tensor> = {};
      for (const name of (await this.session('evaluate')).inputNames) {
        const source = this.description.evaluated[name];
        feeds[name] = source === undefined ? this.tensor(arrays[name] as Typed) : (predicted[source] as Tensor);
      }
      const results = await this.run('evaluate', feeds);
      const sums = Object.entries(results).map(async ([name, value]): Promise<[string, number[]]> => [name, await numbers(value)]);
      return Object.fromEntries(await Promise.all(sums));
    });
  }

  setExamples(count: number): Promise<void> {
    return this.alone(async () => {
      const name = this.description.different;
      if (name && (await this.number(name)) === Infinity) {
        this.state[name] = this.tensor({ type: 'float32', data: Float32Array.of(count), dims: [] });
      }
    });
  }

  save(): Promise<Uint8Array<ArrayBuffer>> {
    return this.alone(async () => {
      const arrays = Object.entries(this.state).map(async ([name, tensor]): Promise<[string, Typed]> => [name, await values(tensor)]);
      return written(Object.fromEntries(await Promise.all(arrays)), { identity: this.description.identity });
    });
  }

  restore(saved: Uint8Array): Promise<void> {
    return this.alone(async () => {
      const [arrays, metadata] = readTensors(saved);
      const { identity, state, types } = this.description;
      if (metadata['identity'] !== identity) {
        throw new TrainingError(`the saved state belongs to the training files '${metadata['identity']}', these are '${identity}'; load those files.`);
      }
      const restored = Object.entries(state).map(([name, shape]): [string, Tensor] => {
        const array = arrays[name];
        if (!array) throw new TrainingError(`the saved state has no '${name}'; it is damaged.`);
        const type = types[name] ?? 'float32';
        return [name, this.tensor(typed(name, { type, shape }, array as Values))];
      });
      this.state = Object.fromEntries(restored);
      this.step = undefined;
    });
  }

  async release(): Promise<void> {
    await this.alone(async () => {
      this.released = true;
      for (const session of this.sessions.values()) await (await session).release();
    });
  }

  // -- private ---------------------------------------------------------------------------------------

  /**
   * Run a function after those before it: the state has one reader or writer at a time, and a
   * runtime in WebAssembly one call, since calls that overlap share a stack there.
   */
  private alone<T>(use: () => Promise<T>): Promise<T> {
    const result = (LAST.get(this.runtime) ?? Promise.resolve()).then(() => {
      if (this.released) throw new TrainingError('the trainer was released; load its files again.');
      return use();
    });
    LAST.set(this.runtime, result.catch(() => undefined));
    return result;
  }

  /** Return the session of a file; it is created when it is needed first. */
  private session(name: Name): Promise<Session> {
    let session = this.sessions.get(name);
    if (!session) {
      // Graph optimizations take most of the time in which a step's session is created, and save none of a step.
      const level = name === 'training' ? { graphOptimizationLevel: 'disabled' } : {};
      const options = { logSeverityLevel: 3, ...level, ...this.options.session };
      session = this.runtime.InferenceSession.create(this.files.get(name) as Uint8Array, options);
      this.files.delete(name);
      if (name !== 'initial') this.sessions.set(name, session);
    }
    return session;
  }

  private async run(name: Name, feeds: Record<string, Tensor>): Promise<Record<string, Tensor>> {
    const session = await this.session(name);
    return (await session.run(feeds as Record<string, never>)) as Record<string, Tensor>;
  }

  private tensor({ type, data, dims }: Typed): Tensor {
    return new this.runtime.Tensor(typeOfRuntime(type) as never, data as never, dims);
  }

  private async taken(): Promise<number> {
    return (this.step ??= await this.number('step'));
  }

  private async number(state: string): Promise<number> {
    return (await numbers(this.state[state] as Tensor))[0] as number;
  }

  /** Return the outputs of `predict.onnx`, which may have more than the model. */
  private async predicted(inputs: Arrays): Promise<Record<string, Tensor>> {
    const known = this.description.inputs;
    this.checkNames(inputs, Object.keys(known));
    const feeds: Record<string, Tensor> = {};
    const arrays: Record<string, Typed> = {};
    for (const name of (await this.session('predict')).inputNames) {
      const weight = this.state[name];
      if (weight) feeds[name] = weight;
      else arrays[name] = this.array(name, inputs[name]);
    }
    counts(arrays, this.description.data);
    for (const [name, array] of Object.entries(arrays)) feeds[name] = this.tensor(array);
    return this.run('predict', feeds);
  }

  /** Return the arrays of a batch in the types of the file; weights that are not given are ones. */
  private batch(given: Arrays): Record<string, Typed> {
    const { rate: _, ...types } = this.description.data;
    this.checkNames(given, Object.keys(types));
    const weights = new Set(Object.values(this.description.weights).map(([name]) => name));
    const arrays: Record<string, Typed> = {};
    for (const name of Object.keys(types)) {
      if (name in given || !weights.has(name)) arrays[name] = this.array(name, given[name]);
    }
    const sizes = counts(arrays, types);
    for (const name of weights) arrays[name] ??= ones(types[name] as ArrayType, sizes);
    return arrays;
  }

  private array(name: string, given: Values | undefined): Typed {
    if (given === undefined) throw new TrainingError(`the files need '${name}'; add it to the batch.`);
    return typed(name, this.description.data[name] as ArrayType, given);
  }

  private checkNames(given: Arrays, known: readonly string[]): void {
    for (const name of Object.keys(given)) {
      if (!known.includes(name)) throw new TrainingError(`the files have no input '${name}'; their inputs are: ${known.join(', ')}.`);
    }
  }
}

async function values(tensor: Tensor): Promise<Typed> {
  const data = (await tensor.getData()) as Data;
  return { type: tensor.type, data, dims: tensor.dims };
}

async function numbers(tensor: Tensor): Promise<number[]> {
  return Array.from(await dataOf(tensor), Number);
}

/** Return the numbers of a tensor, without waiting where they are in memory. */
function dataOf(tensor: Tensor): ArrayLike<number | bigint> | Promise<ArrayLike<number | bigint>> {
  const data = tensor.location === 'cpu' ? tensor.data : tensor.getData();
  return data as ArrayLike<number | bigint> | Promise<ArrayLike<number | bigint>>;
}
