// Types of treadle.js, the runtime of what Treadle's `export_web` writes.

export type DType = "float32" | "bfloat16" | "int32" | "uint32" | "int64" | "int8" | "uint8" | "bool" | "float64";
export type Elements = Float32Array | Float64Array | Int32Array | Uint32Array | Int8Array | Uint8Array | Uint16Array | BigInt64Array;
/** What an input or a value may be given as: elements in rows, nested or flat. Numbers are rounded to
 *  bfloat16 where that is asked for; a Uint16Array is its bits. Integers that do not fit are refused. */
export type Given = Elements | number | boolean | Given[];
export type Inputs = Record<string, Given> | Elements | Given[];
/** Results by name; bfloat16 comes as Float32Array, which has every such number. */
export type Outputs = Record<string, Elements | number>;

export interface Tensor {
  dtype: DType;
  shape: number[];
  data: Elements;
}

export interface RunOptions {
  /** Whether results are waited for and read; without it `null` comes at once. */
  read?: boolean;
}

export declare const FORMAT: number;

export declare class TreadleError extends Error {
  operation: string;
  cause: string;
  remedy: string;
  constructor(operation: string, cause: string, remedy?: string);
}

export interface Place {
  key: string;
  dtype: DType;
  shape: number[];
}

export interface Program {
  readonly name: string;
  readonly inputs: readonly Place[];
  readonly outputs: readonly { name: string; dtype: DType; shape: number[] }[];
  /** When the browser has compiled its kernels, which begins when this is first asked for. */
  readonly compiled: Promise<void>;
}

/** Parameters and states on the GPU, and the programs of a folder. */
export declare class Model {
  readonly device: GPUDevice;
  readonly bundle: Record<string, any>;
  readonly programs: Record<string, Program>;
  readonly values: Map<string, { dtype: DType; shape: number[]; file: string; kind: string }>;
  /** Updates made, and micro-steps since the last one. */
  counters: { steps: number; micro: number };
  /** The seed of a file that was loaded, where it is another than the folder's; else null. */
  seed: number[] | null;
  /** Why the GPU can no longer be used; null while it can. */
  lost: TreadleError | null;
  /** One training step, or one micro-step of an accumulation. */
  step(batch: Inputs, options?: { read?: true }): Promise<Outputs>;
  step(batch: Inputs, options: RunOptions): Promise<Outputs | null>;
  /** Run a program by name. */
  run(name: string, inputs: Inputs, options?: { read?: true }): Promise<Outputs>;
  run(name: string, inputs: Inputs, options: RunOptions): Promise<Outputs | null>;
  program(name: string): Program;
  /** Start again from what was exported: weights, optimizer and counters. */
  reset(): void;
  write(name: string, data: Given): void;
  read(names: string[]): Promise<Map<string, Elements>>;
  /** Parameters and states as a safetensors file: `step.load_params` in Python takes them. */
  saveWeights(): Promise<Uint8Array>;
  /** Everything that the next step depends on: `step.load` in Python goes on from there. */
  saveState(): Promise<Uint8Array>;
  /** Take values of a file by name, all or nothing. */
  load(bytes: ArrayBuffer | Uint8Array): void;
  close(): void;
}

/** A model of an exported folder, with its weights on the GPU. */
export declare function open(base?: string, options?: { device?: GPUDevice | null; lazy?: boolean }): Promise<Model>;
/** A GPU that has what a model needs, or a TreadleError that says what is missing. */
export declare function openDevice(limits?: Record<string, number>): Promise<GPUDevice>;

export declare function readSafetensors(bytes: ArrayBuffer | Uint8Array): { tensors: Map<string, Tensor>; metadata: Record<string, string> };
export declare function writeSafetensors(tensors: Map<string, Tensor> | Record<string, Tensor>, metadata?: Record<string, string> | null): Uint8Array;
/** The random state of a program: seed (2 words), step, micro-step, scan index, sites. */
export declare function makeKey(seed: [number, number] | number[], step?: number, microStep?: number): Uint32Array;
export declare function toWords(dtype: DType, array: Elements): Uint32Array;
export declare function fromWords(dtype: DType, words: Uint32Array): Elements;
