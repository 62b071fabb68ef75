// Trains with the files of kfac_engine.export_training, in C# with ONNX Runtime alone.
//
//   mcs -r:Microsoft.ML.OnnxRuntime.dll Train.cs        (Mono; or a project of .NET)
//   mono Train.exe FOLDER DIGITS STEPS
//
// The library is Microsoft.ML.OnnxRuntime of NuGet. FOLDER has the files of the digits CNN; DIGITS is
// written by scripts/browser_files.py: two numbers, images of 64 bytes from 0 to 16, and labels.

using System;
using System.Collections.Generic;
using System.Globalization;
using System.IO;
using System.Linq;
using Microsoft.ML.OnnxRuntime;

public sealed class Train : IDisposable
{
    private const int Batch = 64;
    private const string New = "new ";

    private readonly RunOptions run = new RunOptions();
    private readonly InferenceSession training;
    private readonly Dictionary<string, OrtValue> state = new Dictionary<string, OrtValue>();

    private Train(string folder)
    {
        var options = new SessionOptions { IntraOpNumThreads = 1 };
        options.GraphOptimizationLevel = GraphOptimizationLevel.ORT_DISABLE_ALL;
        training = new InferenceSession(Path.Combine(folder, "training.onnx"), options);
        using (var initial = new InferenceSession(Path.Combine(folder, "initial.onnx")))
        {
            var values = initial.Run(run, new string[0], new OrtValue[0], initial.OutputNames);
            for (int i = 0; i < values.Count; i++) state[initial.OutputNames[i]] = values[i];
        }
    }

    /// <summary>Takes a step; returns the loss. An output without entries keeps the old state.</summary>
    private float Step(Dictionary<string, OrtValue> batch)
    {
        var feeds = state.Concat(batch).ToDictionary(pair => pair.Key, pair => pair.Value);
        var results = training.Run(run, feeds, training.OutputNames);
        float loss = float.NaN;
        for (int i = 0; i < results.Count; i++)
        {
            string name = training.OutputNames[i];
            if (name == "loss") loss = results[i].GetTensorDataAsSpan<float>()[0];
            bool isState = name.StartsWith(New, StringComparison.Ordinal);
            if (isState && results[i].GetTensorTypeAndShape().ElementCount > 0)
            {
                state[name.Substring(New.Length)].Dispose();
                state[name.Substring(New.Length)] = results[i];
            }
            else results[i].Dispose();
        }
        return loss;
    }

    public void Dispose()
    {
        foreach (var value in state.Values) value.Dispose();
        training.Dispose();
        run.Dispose();
    }

    public static void Main(string[] arguments)
    {
        byte[] bytes = File.ReadAllBytes(arguments[1]);
        int count = BitConverter.ToInt32(bytes, 0), examples = BitConverter.ToInt32(bytes, 4);
        using (var train = new Train(arguments[0]))
        {
            for (int step = 0; step < int.Parse(arguments[2]); step++)
            {
                var pixels = new float[Batch * 64];
                var labels = new long[Batch];
                for (int i = 0; i < Batch; i++)
                {
                    int number = (step * Batch + i) % examples;
                    for (int k = 0; k < 64; k++) pixels[64 * i + k] = bytes[8 + 64 * number + k] / 16f;
                    labels[i] = bytes[8 + 64 * count + number];
                }
                var batch = new Dictionary<string, OrtValue>
                {
                    ["image"] = OrtValue.CreateTensorValueFromMemory(pixels, new long[] { Batch, 1, 8, 8 }),
                    ["targets"] = OrtValue.CreateTensorValueFromMemory(labels, new long[] { Batch }),
                    ["rate"] = OrtValue.CreateTensorValueFromMemory(new[] { 1f }, new long[0]),
                };
                Console.WriteLine(train.Step(batch).ToString("R", CultureInfo.InvariantCulture));
                foreach (var value in batch.Values) value.Dispose();
            }
        }
    }
}
