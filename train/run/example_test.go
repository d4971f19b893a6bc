// This file owns the example of the package.

package run_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/train/run"
)

// The example trains a few steps of a small dense model on the CPU, without a folder.
func Example() {
	o := run.DefaultOptions()
	o.Model = run.ModelSpec{Keys: map[string]any{
		"_name_or_path": "example", "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
		"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256,
	}}
	o.Steps, o.Micro, o.Seq = 3, 1, 32
	o.ChoosePolicy()
	machine := run.Machine{Open: func(_ int, watch device.Observer) (device.Device, error) {
		return cpu.Open(cpu.Options{Observe: watch})
	}}
	job, err := run.NewJob(o, machine, slog.New(slog.DiscardHandler))
	if err != nil {
		log.Fatal(err)
	}
	summary, err := job.Run(context.Background(), "", false, run.NewProgress(io.Discard, nil, nil))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(summary.Policy, summary.Steps, "steps, finished:", summary.Finished)
	// Output:
	// stash 3 steps, finished: true
}
