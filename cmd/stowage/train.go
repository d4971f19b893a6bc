// This file owns `stowage train`. The trainer has not landed: the command says
// so and fails, so that no script takes silence for success.

package main

import (
	"errors"

	"github.com/spf13/cobra"
)

var errNoTrainer = errors.New("training is not there yet; what works today: `stowage plan` says what a job " +
	"will need, `stowage doctor` looks at this machine, `stowage bench` measures copies, the paged stash, offloading and pools, and `go test ./...` checks everything")

func newTrain() *cobra.Command {
	return &cobra.Command{
		Use:   "train",
		Short: "Train a small model under each memory policy (not there yet)",
		Long: `Train a small mixture-of-experts model under each memory policy in turn and
compare peak memory, time and loss.

Training is not there yet: for now this command says what already works and
exits with code 1.`,
		Example: "  stowage train",
		Args:    noArgs,
		RunE:    func(*cobra.Command, []string) error { return errNoTrainer },
	}
}
