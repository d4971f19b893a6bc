// This file owns what is wrong with the flags of `stowage train` before the model is known:
// values that would be taken for missing ones, and flags that would change nothing.

package main

import (
	"fmt"

	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage/train/run"
)

// checkTrain returns an error if a flag has a value that [run.Options] takes for "not
// given". An empty option is right if it clears what --config or the resumed run says, or
// a list of modules that the policy has.
func checkTrain(f *pflag.FlagSet) (err error) {
	var none run.Options
	options := pflag.NewFlagSet("", pflag.ContinueOnError)
	addTrainOptions(options, &none)
	replaces := f.Changed("config") || f.Changed("resume")
	f.Visit(func(x *pflag.Flag) {
		clears := options.Lookup(x.Name) != nil && (replaces || x.Value.Type() == listType && f.Changed("policy"))
		switch value := x.Value.String(); {
		case err != nil:
		case blank(value) && !clears:
			err = usagef("--%s is empty; give a value, or leave the flag out", x.Name)
		case value != "0":
		case x.Name == "pp" || x.Name == "vpp" || x.Name == "ep" || x.Name == "dp":
			err = usagef("--%s 0 is out of range; give a number from 1, or leave the flag out to let the model choose", x.Name)
		case x.Name == "capacity-factor" && !replaces:
			err = usagef("--capacity-factor 0 is out of range; give a number above 0, or leave the flag out for no limit")
		}
	})
	return err
}

// checkIdle returns an error if a flag was given and changes nothing, because another one
// is missing or contradicts it. o has the options of all sources.
func checkIdle(f *pflag.FlagSet, o *run.Options, resume, single bool) error {
	for _, x := range []struct {
		flag  string
		idle  bool
		needs string
	}{
		{"grad-comm-dtype", o.Pool == "", "--pool, such as --pool arena"},
		{"prefetch", o.Pool == "", "--pool, such as --pool arena"},
		{"min-lr", o.Decay == 0, "--decay, the steps after which it is reached"},
		{"save-every", !f.Changed("out"), "--out, the folder to save to"},
		{"keep", !f.Changed("out"), "--out, the folder to save to"},
		{"trace", o.Trace && single && !f.Changed("out"), "--out, the folder for the trace"},
	} {
		if f.Changed(x.flag) && x.idle {
			return usagef("--%s changes nothing without %s; add that, or leave --%[1]s out", x.flag, x.needs)
		}
	}
	if resume || o.Decay <= 0 {
		return nil // a resumed run keeps its rates
	}
	switch {
	case o.Decay <= o.WarmUp:
		return usagef("--decay %d ends before --warm-up %d; give more steps of decay, or fewer of warm-up", o.Decay, o.WarmUp)
	case o.MinLR > o.LR:
		return usagef("--min-lr %s is above --lr %s, and --decay lowers the rate; give a lower --min-lr", number(o.MinLR), number(o.LR))
	}
	return nil
}

// number writes a number without needless digits.
func number(x float64) string { return fmt.Sprintf("%g", x) }
