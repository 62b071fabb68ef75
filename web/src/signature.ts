/** Writes the types of training files as TypeScript. */

import { ArrayType, Description } from './types.js';

const OUTPUTS: Readonly<Record<string, string>> = {
  float32: 'Float32Array', float64: 'Float64Array', int64: 'BigInt64Array', uint64: 'BigUint64Array', int32: 'Int32Array',
  uint32: 'Uint32Array', int16: 'Int16Array', uint16: 'Uint16Array', int8: 'Int8Array', uint8: 'Uint8Array', bool: 'Uint8Array',
  object: 'readonly string[]', string: 'readonly string[]',
};
const kindOf = (type: string): string =>
  type.startsWith('float') ? 'Floats' : type === 'bool' ? 'Truths' : type.includes('int') ? 'Integers' : 'Texts';

/** Return a module that declares the signature of training files under a name. */
export function signature(description: Description, name: string): string {
  const { data, inputs, predictions, weights, metrics } = description;
  const optional = new Set(Object.values(weights).map(([input]) => input));
  const used = new Set<string>();
  const entry = (key: string, { type, shape }: ArrayType, kind: string, mark = ''): string =>
    `    /** ${type}, ${shape.join(' × ') || 'a number'} */\n    ${JSON.stringify(key)}${mark}: ${kind};`;
  const input = (key: string): string => {
    const type = data[key] as ArrayType;
    used.add(kindOf(type.type));
    return entry(key, type, kindOf(type.type), optional.has(key) ? '?' : '');
  };
  const block = (key: string, lines: readonly string[]): string => `  ${key}: {\n${lines.join('\n')}\n  };`;
  const blocks = [
    block('batch', Object.keys(data).filter((key) => key !== 'rate').map(input)),
    block('inputs', Object.keys(inputs).map(input)),
    block('outputs', Object.entries(predictions).map(([key, type]) => entry(key, type, OUTPUTS[type.type] ?? 'Uint16Array'))),
    block('metrics', metrics.filter((key) => key !== 'finite').map((key) => `    ${JSON.stringify(key)}: number;`)),
  ];
  return `// Written by kfac-engine-types from the training files ${description.identity}.
import type { ${[...used].sort().join(', ')}, Signature } from 'kfac-engine';

/** ${description.model || 'A model'}, trained with ${description.optimizer}. */
export interface ${name} extends Signature {
${blocks.join('\n')}
}
`;
}
