export { order } from './batches.js';
export type { BatchOptions, Batches } from './batches.js';
export { forget } from './storage.js';
export { Trainer } from './trainer.js';
export type { BatchSource, EvaluateOptions, FitOptions, LoadOptions, StepRecord } from './trainer.js';
export { TrainingError } from './types.js';
export type {
  AnySignature, ArrayType, Data, Description, Floats, Integers, Result, Runtime, Shaped, Signature, Texts, Truths, Values,
} from './types.js';
export { serve } from './worker.js';
export type { Port } from './worker.js';
