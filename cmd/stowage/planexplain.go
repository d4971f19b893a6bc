// This file owns `stowage plan explain`: its flags and its errors.

package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/planview"
	"github.com/stowage-dev/stowage/internal/spell"
)

func newPlanExplain() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "explain GROUP",
		Short: "Say why a group of saved tensors is kept, offloaded or recomputed",
		Long: `List the tensors of a group, and what a search for the fastest policy that fits
decides about every module that could offload or recompute them: the bytes of a layer
and microbatch, the time of the copy, the compute that can hide it, and how much slower
the best policy with that choice would be. Describe the job as for "stowage plan", and
name the hardware.`,
		Example: `  stowage plan explain core_attn --model mixtral-8x7b --gpu h100 --gpus 64 --pp 4 --ep 8 --seq 4096
  stowage plan explain moe_act --megatron train.yaml --gpu h100 --budget 60GiB --json`,
		Args:               cobra.ArbitraryArgs,
		DisableFlagParsing: true,
	}
	var job jobFlags
	job.add(cmd)
	asJSON := jsonFlag(cmd)
	settingsUsage(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		w, help, err := parsePlan(cmd, args)
		switch {
		case err != nil:
			return err
		case help:
			return cmd.Help()
		case len(w.rest) == 0:
			return usagef("which group? such as `stowage plan explain core_attn --model deepseek-v3 --gpu h100`")
		}
		group := w.rest[0]
		w.rest = w.rest[1:]
		s, notes, err := job.setup(w)
		if err != nil {
			return err
		}
		m := measure(cmd, "searching")
		e, err := planview.Explain(s, group)
		m.end()
		if err != nil {
			return explainError(err)
		}
		e.Warnings = append(e.Warnings, notes...)
		if *asJSON {
			return printJSON(cmd, e)
		}
		e.WriteText(cmd.OutOrStdout())
		return nil
	}
	return cmd
}

// explainError words what planview.Explain returns.
func explainError(err error) error {
	var unknown *planview.UnknownGroup
	if !errors.As(err, &unknown) {
		return planError(err)
	}
	hint := "there are " + strings.Join(unknown.Known, ", ")
	if near := spell.Nearest(unknown.Group, unknown.Known); near != "" {
		hint = fmt.Sprintf("did you mean %s? There are %s", near, strings.Join(unknown.Known, ", "))
	}
	return usagef("no layer of %s saves a group %q; %s", unknown.Model, unknown.Group, hint)
}
