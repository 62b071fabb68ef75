/** What the names of a training file are, and what its arrays hold. */

/** Numbers of an input with fractions, in the order of the last axis first. */
export type Floats = Shaped<
  | Float32Array | Float64Array | Int8Array | Uint8Array | Uint8ClampedArray | Int16Array | Uint16Array
  | Int32Array | Uint32Array | readonly number[]
>;

/** Whole numbers, such as classes. */
export type Integers = Shaped<
  | Int8Array | Uint8Array | Uint8ClampedArray | Int16Array | Uint16Array | Int32Array | Uint32Array
  | BigInt64Array | BigUint64Array | readonly number[] | readonly bigint[]
>;

/** Truth values; zeros and ones in place of them. */
export type Truths = Shaped<Uint8Array | readonly boolean[]>;

/** Texts. */
export type Texts = Shaped<readonly string[]>;

/** An array, or an array with its shape; without one, the length tells the number of examples. */
export type Shaped<A> = A | { readonly data: A; readonly dims: readonly number[] };

/** What an input of any type accepts. */
export type Values = Floats | Integers | Truths | Texts;

/** What an output of any type has. */
export type Data =
  | Float32Array | Float64Array | Int8Array | Uint8Array | Int16Array | Uint16Array | Int32Array
  | Uint32Array | BigInt64Array | BigUint64Array | readonly string[];

/** An output: its numbers and its shape. */
export interface Result<D = Data> {
  readonly data: D;
  readonly dims: readonly number[];
}

/**
 * The inputs and outputs of a training file. `kfac-engine-types` writes one for a file, so that
 * the compiler checks names and kinds of arrays.
 */
export interface Signature {
  /** The arrays of a batch, by input of `training.onnx`. */
  batch: object;
  /** The inputs of the model. */
  inputs: object;
  /** The arrays of the outputs of the model. */
  outputs: object;
  /** The metrics of a step and of an evaluation. */
  metrics: { loss: number };
}

/** A file of which the compiler knows nothing. */
export interface AnySignature extends Signature {
  batch: Record<string, Values>;
  inputs: Record<string, Values>;
  outputs: Record<string, Data>;
  metrics: { loss: number; accuracy?: number; label_error_rate?: number };
}

/** Type and shape of an array; a text in a shape is a multiple of the number of examples. */
export interface ArrayType {
  readonly type: string;
  readonly shape: readonly (number | string)[];
}

/** The metadata of training files. */
export interface Description {
  /** Equal in the files of one export, and in the states that belong to them. */
  readonly identity: string;
  readonly model: string;
  readonly optimizer: string;
  readonly options: Readonly<Record<string, unknown>>;
  readonly losses: readonly string[];
  /** Axes of the examples, by input of the model; -1 without. */
  readonly inputs: Readonly<Record<string, number>>;
  /** Axes of the examples, by input with targets. */
  readonly targets: Readonly<Record<string, number>>;
  /** Shapes of the states, by name. */
  readonly state: Readonly<Record<string, readonly number[]>>;
  /** The states that are weights or running statistics of the model. */
  readonly parameters: readonly string[];
  readonly metrics: readonly string[];
  /** The inputs of a step that are no state, and `rate`. */
  readonly data: Readonly<Record<string, ArrayType>>;
  /** The outputs of the model. */
  readonly predictions: Readonly<Record<string, ArrayType>>;
  /** By input of `evaluate.onnx`, the output of `predict.onnx` that it reads. */
  readonly evaluated: Readonly<Record<string, string>>;
  /** Types of the states that are not float32. */
  readonly types: Readonly<Record<string, string>>;
  /** The state with the number of different examples; empty without. */
  readonly different: string;
  /** By output of the model, the input with the weights of its targets and their number of axes. */
  readonly weights: Readonly<Record<string, readonly [string, number]>>;
  /** The only number of examples; null for any. */
  readonly batch_size: number | null;
}

/** A value of ONNX Runtime, as far as this package reads it. */
export interface Tensor {
  readonly type: string;
  readonly dims: readonly number[];
  readonly size: number;
  readonly location: string;
  readonly data: unknown;
  getData(releaseData?: boolean): Promise<unknown>;
  dispose(): void;
}

/** A session of ONNX Runtime. */
export interface Session {
  readonly inputNames: readonly string[];
  readonly outputNames: readonly string[];
  run(feeds: Record<string, never>): Promise<Readonly<Record<string, unknown>>>;
  release(): Promise<void>;
}

/** The module `onnxruntime-web` or `onnxruntime-node`. */
export interface Runtime {
  readonly InferenceSession: {
    create(model: Uint8Array, options?: object): Promise<Session>;
  };
  readonly Tensor: new (type: never, data: never, dims: readonly number[]) => Tensor;
  readonly env: object;
}

/** What a call refuses, or a file that cannot be read. */
export class TrainingError extends Error {
  override readonly name = 'TrainingError';
}
